#include "storage/base/latency_histogram.h"

#include <algorithm>

namespace wavekv {

void LatencyHistogram::Record(double latency_us) {
  const auto edge = std::lower_bound(kEdgesUs.begin(), kEdgesUs.end(), latency_us);
  counts_[static_cast<size_t>(edge - kEdgesUs.begin())].fetch_add(1, std::memory_order_relaxed);
  sum_ns_.fetch_add(static_cast<uint64_t>(std::max(latency_us, 0.0) * 1e3),
                    std::memory_order_relaxed);
}

LatencyHistogram::Snapshot LatencyHistogram::Read() const {
  Snapshot snapshot;
  for (size_t i = 0; i < counts_.size(); ++i) {
    snapshot.counts[i] = counts_[i].load(std::memory_order_relaxed);
    snapshot.count += snapshot.counts[i];
  }
  snapshot.sum_us = static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) / 1e3;
  return snapshot;
}

}  // namespace wavekv
