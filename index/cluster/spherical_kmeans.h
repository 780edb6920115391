// Spherical k-means whose passes over all centroids are few (docs/decisions/008-building.md).
//
// A full pass compares every point with every centroid. After it a point's nearest centroid hardly
// changes, and when it does, to one near the old one: passes between full ones compare a point only
// with the panels of like centroids about its own, and only the eighth that is served worst with
// all. The last pass is a full one, so that every point is with the centroid nearest to it, but for
// those that fill clusters left empty.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "index/simd/kernels.h"

namespace wavekv {

struct KMeansInput {
  std::span<const float> points;             // [point_count, dim], finite, of about length 1
  std::span<const float> initial_centroids;  // [centroid_count, dim]
  uint32_t point_count = 0;
  uint32_t centroid_count = 0;  // 1 to point_count, at most 65535
  uint32_t dim = 0;
  uint32_t iterations = 0;  // Moves of the centroids, at most; ends before when points settle.
  std::function<void()> pause = nullptr;  // As in ClusterOptions.
};

struct KMeansResult {
  // [point_count], below centroid_count; each is in use if points differ.
  std::vector<uint32_t> labels;
  uint32_t full_passes = 0;
  uint32_t near_passes = 0;
};

// Works in the caller's thread alone. The result depends on the input and, in rounding, on whether
// the level has fused multiply-adds; on nothing else.
KMeansResult SphericalKMeans(const simd::Kernels& kernels, const KMeansInput& input);

}  // namespace wavekv
