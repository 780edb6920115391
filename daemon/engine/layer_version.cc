#include "daemon/engine/layer_version.h"

#include <utility>

#include "storage/base/check.h"

namespace wavekv {

Segment::Segment(TokenRange range, std::vector<SegmentHead> heads, uint64_t pool_bytes,
                 IndexGauge gauge)
    : range_(range), heads_(std::move(heads)), pool_bytes_(pool_bytes), gauge_(std::move(gauge)) {
  for (const SegmentHead& head : heads_) {
    WAVEKV_CHECK(head.first_position == range_.begin && head.token_count == range_.size(),
                 "every head of a segment holds its whole range");
    index_bytes_ += head.index_bytes();
  }
  gauge_->fetch_add(index_bytes_);
}

Segment::~Segment() { gauge_->fetch_sub(index_bytes_); }

LayerVersion::LayerVersion(uint64_t number, SegmentList segments, uint32_t kv_head_count)
    : number_(number), segments_(std::move(segments)), heads_(kv_head_count) {
  uint64_t end = kSinkTokens;
  for (const auto& segment : segments_) {
    WAVEKV_CHECK(segment->range().begin == end, "segments of a version join");
    end = segment->range().end;
    for (uint32_t head = 0; head < kv_head_count; ++head) {
      heads_[head].push_back(&segment->head(head));
    }
  }
}

uint64_t LayerVersion::clustered_end() const {
  return segments_.empty() ? kSinkTokens : segments_.back()->range().end;
}

uint64_t LayerVersion::index_bytes() const {
  uint64_t bytes = 0;
  for (const auto& segment : segments_) bytes += segment->index_bytes();
  return bytes;
}

PlannedRanges LayerVersion::Ranges() const {
  PlannedRanges ranges;
  for (const auto& segment : segments_) ranges.push_back(segment->range());
  return ranges;
}

}  // namespace wavekv
