// Finds keys that lie far from the rest of their cluster and gives them clusters of their own: an
// average of 16 keys hides a lone one, and with it the needle that a query looks for
// (docs/decisions/003-outliers.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/cluster/split.h"

namespace wavekv {

// The cluster whose farthest key is farthest, beyond what the others' spread explains, is cut in
// two around that key (two means, started from it and from the mean of the rest), again and again:
// until `added_max` clusters were added, or no key's squared distance exceeds the spread of its
// cluster by `excess` times that of all clusters. A lone key ends up alone; a few alike together.
// Distances are in units of how far clusters spread in each dimension.
// `points` [token_count, dim] hold no infinity. No cluster becomes empty.
void SeparateFarKeys(std::span<const float> points, uint32_t dim, double excess, uint32_t added_max,
                     std::vector<ClusterMembers>* clusters);

}  // namespace wavekv
