// Spherical k-means with FAISS's training loop around this project's own assignment loop.
//
// FAISS updates and splits centroids; the assignment, which is nearly all of the work, goes through
// index/simd. So no BLAS runs (Debian's FAISS would bring its thread pool), and the result is the
// same on any number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "index/simd/kernels.h"

namespace wavekv {

struct KMeansInput {
  std::span<const float> points;             // [point_count, dim], finite
  std::span<const float> initial_centroids;  // [centroid_count, dim]
  uint32_t point_count = 0;
  uint32_t centroid_count = 0;  // 1 to point_count
  uint32_t dim = 0;
  uint32_t iterations = 0;
  uint64_t seed = 0;
};

// Label of each point, below centroid_count; a label may have no point. Works in the caller's
// thread alone, whatever OpenMP is set to. Internal: FAISS threw, with its text.
absl::StatusOr<std::vector<uint32_t>> SphericalKMeans(const simd::Kernels& kernels,
                                                      const KMeansInput& input);

}  // namespace wavekv
