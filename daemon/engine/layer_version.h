// The clustered part of one layer: an immutable version, published by one pointer swap.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/engine/cut_plan.h"
#include "index/segment.h"

namespace wavekv {

// Index bytes of all live segments of an engine. Outlives every segment.
using IndexGauge = std::shared_ptr<std::atomic<uint64_t>>;

// A clustered segment of one layer, all KV heads. Immutable; shared by versions, forks and readers.
class Segment {
 public:
  // `heads` one per KV head; they own their payload, `pool_bytes` of the block pool.
  Segment(TokenRange range, std::vector<SegmentHead> heads, uint64_t pool_bytes, IndexGauge gauge);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const TokenRange& range() const { return range_; }
  const SegmentHead& head(uint32_t kv_head) const { return heads_[kv_head]; }
  uint64_t pool_bytes() const { return pool_bytes_; }
  uint64_t index_bytes() const { return index_bytes_; }

 private:
  const TokenRange range_;
  const std::vector<SegmentHead> heads_;
  const uint64_t pool_bytes_;
  const IndexGauge gauge_;
  uint64_t index_bytes_ = 0;
};

using SegmentList = std::vector<std::shared_ptr<const Segment>>;

// The segments cover [kSinkTokens, clustered_end()) without gaps.
class LayerVersion {
 public:
  LayerVersion(uint64_t number, SegmentList segments, uint32_t kv_head_count);

  uint64_t number() const { return number_; }
  const SegmentList& segments() const { return segments_; }
  HeadIndex Head(uint32_t kv_head) const { return heads_[kv_head]; }
  uint64_t clustered_end() const;
  uint64_t index_bytes() const;
  PlannedRanges Ranges() const;

 private:
  const uint64_t number_;
  const SegmentList segments_;
  std::vector<std::vector<const SegmentHead*>> heads_;  // [kv_head_count][segments]
};

}  // namespace wavekv
