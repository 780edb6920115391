// Groups centroids by likeness, so that a point need only be compared with the few groups about the
// centroid it belonged to.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/simd/kernels.h"

namespace wavekv {

// An order of the `centroid_count` rows of `centroids` [centroid_count, dim] in which each
// kPanelCentroids following ones (a panel, index/simd/assign.h) are alike: halves across the
// direction in which they differ most, again and again.
std::vector<uint16_t> OrderByLikeness(const simd::Kernels& kernels,
                                      std::span<const float> centroids, uint32_t centroid_count,
                                      uint32_t dim);

// For each centroid the `list_count` panels that hold the centroids nearest to it, ascending:
// [centroid_count, list_count]. `panels` [panel_count, dim, kPanelCentroids], list_count <=
// panel_count.
std::vector<uint16_t> NearestPanels(const simd::Kernels& kernels, std::span<const float> centroids,
                                    uint32_t centroid_count, uint32_t dim,
                                    std::span<const float> panels, uint32_t panel_count,
                                    uint32_t list_count);

}  // namespace wavekv
