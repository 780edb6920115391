#include "index/zone/error_bound.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/zone/cluster_mass.h"

namespace wavekv {
namespace {

// Covers the rounding of B and of the sums below.
constexpr double kRoundingFactor = 1 + 1e-5;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Log masses of one cluster for one query head.
struct ClusterMass {
  LogMassBounds log_bounds;
  double log_estimate = 0;
  double value_radius = 0;  // rho / B
};

// Sums over a set of clusters, in units of exp(shift).
struct Sums {
  double misjudged = 0;  // 2 max(hi - m, m - lo) + hi rho / B
  double upper = 0;
  double lower = 0;

  // `value_reach` bounds |v' - o'| / B.
  void Add(const ClusterMass& mass, double value_reach, double shift) {
    const double lo = std::exp(mass.log_bounds.lower - shift);
    const double hi = std::exp(mass.log_bounds.upper - shift);
    const double estimate = std::exp(mass.log_estimate - shift);
    misjudged +=
        value_reach * (std::max(hi - estimate, estimate - lo) + kUnreadShareMax * estimate) +
        hi * mass.value_radius;
    upper += hi;
    lower += lo;
  }
};

// A lower bound of B: the longest clustered value.
double LongestValue(HeadIndex index) {
  float longest = 0;
  for (const SegmentHead* segment : index) longest = std::max(longest, segment->value_norm_max);
  return longest;
}

// 2 b / B; 2 when there is nothing but zeros.
double ValueReach(HeadIndex index, double longest_value) {
  float delta = 0;
  for (const SegmentHead* segment : index) delta = std::max(delta, segment->value_delta_max);
  return 2 * kRoundingFactor * (delta == 0 ? 1 : 1 + delta / longest_value);
}

// Masses of every cluster for query head `g`.
std::vector<ClusterMass> MassesOf(HeadIndex index, const ClusterScores& scores, uint32_t g,
                                  double reach, double longest_value) {
  std::vector<ClusterMass> masses;
  masses.reserve(scores.cluster_count);
  const float* logits = scores.logits.data() + size_t{g} * scores.cluster_count;
  const float* weights = scores.weights.data() + size_t{g} * scores.cluster_count;
  for (const SegmentHead* segment : index) {
    const double slack = ScoreSlack(*segment, reach);
    for (uint32_t c = 0; c < segment->cluster_count; ++c) {
      const size_t at = masses.size();
      const double rho = segment->value_radii[c];
      masses.push_back({BoundLogMass(logits[at], segment->sizes[c], segment->deltas[c],
                                     segment->radii[c], reach, slack),
                        std::log(double{weights[at]}) + scores.tops[g],
                        rho == 0 ? 0 : rho / longest_value});
    }
  }
  return masses;
}

// The bound from what is estimated (`rest`) and a lower bound of the mass of what is exact.
double BoundOf(const Sums& rest, double exact_lower, double value_reach) {
  const double total_lower = exact_lower + rest.lower;
  const double by_mass = total_lower > 0 ? rest.misjudged / total_lower : kInfinity;
  const double share = rest.upper > 0 ? rest.upper / (exact_lower + rest.upper) : 0;
  return std::min(std::isnan(by_mass) ? kInfinity : by_mass, value_reach * share);
}

}  // namespace

std::vector<double> BoundErrors(HeadIndex index, const ClusterScores& scores,
                                std::span<const double> reaches, std::span<const float> steady_lse,
                                std::span<const uint32_t> order) {
  std::vector<double> bounds(order.size() + 1, 0);
  if (scores.cluster_count == 0) return bounds;
  const double longest_value = LongestValue(index);
  const double value_reach = ValueReach(index, longest_value);
  std::vector<bool> in_order(scores.cluster_count, false);
  for (const uint32_t cluster : order) in_order[cluster] = true;

  for (uint32_t g = 0; g < scores.group_size; ++g) {
    const std::vector<ClusterMass> masses = MassesOf(index, scores, g, reaches[g], longest_value);
    double shift = steady_lse[g];
    for (const ClusterMass& mass : masses) shift = std::max(shift, mass.log_bounds.upper);
    Sums rest;
    for (uint32_t c = 0; c < scores.cluster_count; ++c) {
      if (!in_order[c]) rest.Add(masses[c], value_reach, shift);
    }
    // What the first r of the order hold exactly, for each r; then backwards from the estimated
    // rest, so that every sum only grows and nothing cancels.
    std::vector<double> exact_lower(order.size() + 1);
    exact_lower[0] = std::exp(static_cast<double>(steady_lse[g]) - shift);
    for (size_t r = 0; r < order.size(); ++r) {
      exact_lower[r + 1] = exact_lower[r] + std::exp(masses[order[r]].log_bounds.lower - shift);
    }
    for (size_t r = order.size();; --r) {
      bounds[r] = std::max(bounds[r], BoundOf(rest, exact_lower[r], value_reach));
      if (r == 0) break;
      rest.Add(masses[order[r - 1]], value_reach, shift);
    }
  }
  return bounds;
}

}  // namespace wavekv
