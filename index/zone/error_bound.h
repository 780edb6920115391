// Bound of the output error of a plan, for the error budget.
//
// Let o be the exact output of a query head and o' what a plan gives: exact over the steady and the
// retrieved tokens, estimated over the set E of all other clusters. Cluster c of E has true mass
// M in [lo, hi], estimated mass m, stored value mean v' and value radius rho: its true mean value u
// satisfies |u - v'| <= rho. With Z the total true mass,
//
//   o - o' = sum over E of [ (M - m)(v' - o') + M (u - v') ] / Z .
//
// Let B be the length of the KV head's longest value: both v' and o' are no longer (v' up to its
// rounding), so |o - o'| / B <= sum over E of [ 2 max(hi - m, m - lo) + hi rho / B ] / Z_lo.
// On the other hand both outputs agree on all but a share w of their weight, the larger of E's true
// and estimated share, so |o - o'| / B <= 2 w, with w <= H / (X + H), H the sum of hi over E (never
// below m) and X a lower bound of the exact zones' mass. The smaller of the two is the bound.
// B itself is not known, but no value mean is longer, which is what rho / B needs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/segment.h"
#include "index/zone/zone_plan.h"

namespace wavekv {

// For r = 0 .. order.size(): the bound when the first r clusters of `order` are retrieved and all
// others of the index are estimated, the worst over the group. `scores` of the same index,
// `reaches` [group_size] from QueryReach, `steady_lse` [group_size].
std::vector<double> BoundErrors(HeadIndex index, const ClusterScores& scores,
                                std::span<const double> reaches, std::span<const float> steady_lse,
                                std::span<const uint32_t> order);

}  // namespace wavekv
