// Attention of one unit of a benchmark's layer in float64: with the device's own selection, exact,
// and with the zones of the paper (RetroInfer, arXiv 2505.02922) over the same clusters.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu/bench_index.h"

namespace wavekv::bench {

struct ReplayInput {
  const BuiltLayer* built = nullptr;
  void* base = nullptr;        // Where the layer's arrays lie.
  const void* pool = nullptr;  // Host.
  uint32_t unit = 0;
  uint32_t group = 0;
  double scale = 0;
  std::vector<float> queries;       // [group, kBenchDim]
  std::vector<uint32_t> retrieved;  // Clusters that the device chose.
};

struct ReplayOutput {
  std::vector<double> replayed;  // [group, kBenchDim]
  std::vector<double> exact;     // likewise
  // Likewise: 1.8 % of the clusters retrieved by their centroids' weights, the next 23.2 %
  // estimated by size and centroid, the rest dropped.
  std::vector<double> paper;
};

// Downloads the unit's arrays and computes all three, in the caller's thread.
absl::StatusOr<ReplayOutput> Replay(const ReplayInput& input);

// |a - b| / |b|; NaN when a has one.
double RelativeError(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace wavekv::bench
