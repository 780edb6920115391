#include "daemon/engine/segment_labels.h"

#include <iterator>
#include <utility>

namespace wavekv {

SegmentLabels::SegmentLabels(GivenLabels given, std::shared_ptr<BuildCounters> counters)
    : range_(given.range), labels_(std::move(given.labels)), counters_(std::move(counters)) {}

SegmentLabels::~SegmentLabels() {
  if (!used_) counters_->labels_unused.fetch_add(1, std::memory_order_relaxed);
}

void HeldLabels::Put(std::shared_ptr<const SegmentLabels> labels) {
  const TokenRange range = labels->range();
  auto held = by_begin_.lower_bound(range.begin);
  if (held != by_begin_.begin() && std::prev(held)->second->range().end > range.begin) --held;
  while (held != by_begin_.end() && held->first < range.end) held = by_begin_.erase(held);
  by_begin_.emplace(range.begin, std::move(labels));
}

std::shared_ptr<const SegmentLabels> HeldLabels::Take(const TokenRange& range) {
  std::shared_ptr<const SegmentLabels> taken;
  while (!by_begin_.empty() && by_begin_.begin()->second->range().end <= range.end) {
    auto first = by_begin_.extract(by_begin_.begin());
    if (first.mapped()->range() == range) taken = std::move(first.mapped());
  }
  return taken;
}

void HeldLabels::Truncate(uint64_t token_count) {
  while (!by_begin_.empty() && !StaysWith(by_begin_.rbegin()->second->range(), token_count)) {
    by_begin_.erase(std::prev(by_begin_.end()));
  }
}

}  // namespace wavekv
