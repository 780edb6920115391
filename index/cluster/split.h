// Splits a cluster that grew too large, along the direction in which its keys differ most.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace wavekv {

// Offsets of the tokens of one cluster, ascending.
using ClusterMembers = std::vector<uint32_t>;

// Cuts `members` into clusters of at most `size_max` >= 1 tokens each. Every cut is across the
// principal direction of the part it divides, where the squared distance left inside both halves is
// smallest, but never outside the middle half: so the depth is logarithmic, identical keys fall
// into equal runs of positions, and nothing depends on anything but the keys.
// `points` [token_count, dim].
std::vector<ClusterMembers> SplitCluster(std::span<const float> points, uint32_t dim,
                                         ClusterMembers members, uint32_t size_max);

}  // namespace wavekv
