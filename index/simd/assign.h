// How centroids lie in memory for Kernels::nearest_in_panels: in panels, transposed, so that one
// vector holds the same dimension of neighbouring centroids.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace wavekv::simd {

// A panel is [dim, kPanelCentroids] f32. A slot is a centroid's place: panel number *
// kPanelCentroids + column.
inline constexpr size_t kPanelCentroids = 16;

constexpr size_t PanelCount(size_t centroid_count) {
  return (centroid_count + kPanelCentroids - 1) / kPanelCentroids;
}

// Writes the rows centroids[order[slot]] of `centroids` [.., dim] into `panels`
// [PanelCount(order.size()), dim, kPanelCentroids]. The last panel is filled up with copies of its
// last centroid, which never win against it.
void PackPanels(const float* centroids, std::span<const uint16_t> order, size_t dim, float* panels);

}  // namespace wavekv::simd
