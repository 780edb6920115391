// Labels that clients give for segments before they are cut, in place of the daemon's k-means
// (docs/decisions/016-index-built-on-the-gpu.md).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "daemon/engine/cut_plan.h"

namespace wavekv {

// Of one engine, since start.
struct BuildCounters {
  std::atomic<uint64_t> segments_own{0};       // Segments published: by the daemon's k-means,
  std::atomic<uint64_t> segments_given{0};     // or from given labels.
  std::atomic<uint64_t> labels_left_aside{0};  // Labels of segments that were not kept.
  std::atomic<uint64_t> labels_unused{0};      // Kept ones of which no published segment is.
};

// Labels of one segment of a layer as they were given.
struct GivenLabels {
  TokenRange range;
  std::vector<uint16_t> labels;  // [kv_heads, range.size()]
};

// Labels that were kept. Immutable; shared by forks. Counts itself as unused when it goes before a
// segment made of it was published.
class SegmentLabels {
 public:
  SegmentLabels(GivenLabels given, std::shared_ptr<BuildCounters> counters);
  ~SegmentLabels();
  SegmentLabels(const SegmentLabels&) = delete;
  SegmentLabels& operator=(const SegmentLabels&) = delete;

  const TokenRange& range() const { return range_; }
  std::span<const uint16_t> head(uint32_t kv_head) const {
    return std::span(labels_).subspan(kv_head * range_.size(), range_.size());
  }
  void NoteUsed() const { used_ = true; }

 private:
  const TokenRange range_;
  const std::vector<uint16_t> labels_;
  const std::shared_ptr<BuildCounters> counters_;
  mutable std::atomic<bool> used_{false};
};

// Labels of one layer for cuts that are not planned yet. Not thread-safe: its layer's sequence
// guards it. Ranges do not overlap.
class HeldLabels {
 public:
  // Those that it overlaps go.
  void Put(std::shared_ptr<const SegmentLabels> labels);
  // For a cut that is planned: the labels of exactly this range, or null. All that end no later
  // than it go.
  std::shared_ptr<const SegmentLabels> Take(const TokenRange& range);
  // Those of segments that would not stay with token_count tokens go.
  void Truncate(uint64_t token_count);

 private:
  std::map<uint64_t, std::shared_ptr<const SegmentLabels>> by_begin_;
};

}  // namespace wavekv
