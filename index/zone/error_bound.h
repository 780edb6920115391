// Bound of the output error of a plan, for the error budget.
//
// Let o be the exact output of a query head and o' what a plan gives: exact over the steady and the
// retrieved tokens, estimated over the set E of all other clusters. Cluster c of E has true mass
// M in [lo, hi], estimated mass m, stored value mean v' and value radius rho: its true mean value u
// satisfies |u - v'| <= rho. With Z the total true mass,
//
//   o - o' = sum over E of [ (M - m)(v' - o') + M (u - v') ] / Z .
//
// Let B be the length of the KV head's longest value and d the largest |stored - exact mean| of any
// cluster's value: v' and o' are no longer than B + d, so with b = B + d
//
//   |o - o'| / B <= sum over E of [ 2 max(hi - m, m - lo) b / B + hi rho / B ] / Z_lo.
//
// The mean values of clusters with up to a share eps (kUnreadShareMax) of E's estimated mass may be
// left unread, with the segment's mean value, no longer than B, in their place: that moves o' by up
// to 2 eps b / B of E's share, so 2 eps m b / B is added to each term. On the other hand both
// outputs agree on all but a share w of their weight, the larger of E's true and estimated share,
// so |o - o'| / B <= 2 w b / B, with w <= H / (X + H), H the sum of hi over E (never below m) and X
// a lower bound of the exact zones' mass. The smaller of the two is the bound. B itself is not
// known, but is at least the longest clustered value, which is what b / B and rho / B need.
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
