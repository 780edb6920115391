// Divides the tokens of one head's segment into clusters.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/backend/compute_backend.h"
#include "index/cluster/split.h"
#include "index/simd/kernels.h"

namespace wavekv {

// Clusters of the tokens whose keys are `keys` [token_count, dim]: none empty, none larger than
// kClusterTokensMax, each token in exactly one; clusters in order of their first token.
//
// Keys are centred by their mean and clustered by spherical k-means from evenly spaced initial
// centroids, or as `labels` [token_count] say where there are any; large clusters are split; then
// keys that lie far from the rest of their cluster get clusters of their own (far_keys.h).
std::vector<ClusterMembers> PartitionKeys(const simd::Kernels& kernels, std::span<const float> keys,
                                          uint32_t token_count, uint32_t dim,
                                          const ClusterOptions& options,
                                          std::span<const uint16_t> labels = {});

// The keys less their mean, scaled by a power of two so that the largest element is about 1:
// squares then neither overflow nor vanish, whatever the size of the keys.
std::vector<float> CentreKeys(std::span<const float> keys, uint32_t token_count, uint32_t dim);

// `count` of the points [token_count, dim], evenly spaced: where k-means starts.
std::vector<float> EvenlySpaced(std::span<const float> points, uint32_t token_count, uint32_t dim,
                                uint32_t count);

}  // namespace wavekv
