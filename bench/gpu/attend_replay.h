// Attention of one unit of a benchmark's layer in float64: with the device's own selection, and
// exact.
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
  std::vector<double> exact;     // [group, kBenchDim]
};

// Downloads the unit's arrays and computes both, in the caller's thread.
absl::StatusOr<ReplayOutput> Replay(const ReplayInput& input);

// |a - b| / |b|; NaN when a has one.
double RelativeError(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace wavekv::bench
