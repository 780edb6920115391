#include "index/zone/error_bound.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/zone/cluster_mass.h"

namespace wavekv {
namespace {

// |v' - o'| / B: two lengths of at most B, the stored mean up to its rounding to 16 bits (2^-8).
constexpr double kValueSpread = 2.01;
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

  void Add(const ClusterMass& mass, double shift) {
    const double lo = std::exp(mass.log_bounds.lower - shift);
    const double hi = std::exp(mass.log_bounds.upper - shift);
    const double estimate = std::exp(mass.log_estimate - shift);
    misjudged += kValueSpread * std::max(hi - estimate, estimate - lo) + hi * mass.value_radius;
    upper += hi;
    lower += lo;
  }
};

// A lower bound of the length of the index's longest value: a mean is never longer than the
// longest of its values, up to the rounding of the stored mean.
double LongestValue(HeadIndex index) {
  float longest = 0;
  for (const SegmentHead* segment : index) longest = std::max(longest, segment->value_norm_max);
  return longest * (1 - 0x1p-8);
}

// Masses of every cluster for query head `g`.
std::vector<ClusterMass> MassesOf(HeadIndex index, const ClusterScores& scores, uint32_t g,
                                  double reach, double longest_value) {
  std::vector<ClusterMass> masses;
  masses.reserve(scores.cluster_count);
  const float* logits = scores.logits.data() + size_t{g} * scores.cluster_count;
  for (const SegmentHead* segment : index) {
    const double slack = ScoreSlack(*segment, reach);
    for (uint32_t c = 0; c < segment->cluster_count; ++c) {
      const float logit = logits[masses.size()];
      const double rho = segment->value_radii[c];
      masses.push_back({BoundLogMass(logit, segment->sizes[c], segment->deltas[c],
                                     segment->radii[c], reach, slack),
                        static_cast<double>(logit) + LogSize(segment->sizes[c]),
                        rho == 0 ? 0 : rho / longest_value});
    }
  }
  return masses;
}

// The bound from what is estimated (`rest`) and a lower bound of the mass of what is exact.
double BoundOf(const Sums& rest, double exact_lower) {
  const double total_lower = exact_lower + rest.lower;
  const double by_mass = total_lower > 0 ? rest.misjudged / total_lower : kInfinity;
  const double share = rest.upper > 0 ? rest.upper / (exact_lower + rest.upper) : 0;
  return std::min(std::isnan(by_mass) ? kInfinity : by_mass, kValueSpread * share);
}

}  // namespace

std::vector<double> BoundErrors(HeadIndex index, const ClusterScores& scores,
                                std::span<const double> reaches, std::span<const float> steady_lse,
                                std::span<const uint32_t> order) {
  std::vector<double> bounds(order.size() + 1, 0);
  if (scores.cluster_count == 0) return bounds;
  const double longest_value = LongestValue(index);
  std::vector<bool> in_order(scores.cluster_count, false);
  for (const uint32_t cluster : order) in_order[cluster] = true;

  for (uint32_t g = 0; g < scores.group_size; ++g) {
    const std::vector<ClusterMass> masses = MassesOf(index, scores, g, reaches[g], longest_value);
    double shift = steady_lse[g];
    for (const ClusterMass& mass : masses) shift = std::max(shift, mass.log_bounds.upper);
    Sums rest;
    for (uint32_t c = 0; c < scores.cluster_count; ++c) {
      if (!in_order[c]) rest.Add(masses[c], shift);
    }
    // What the first r of the order hold exactly, for each r; then backwards from the estimated
    // rest, so that every sum only grows and nothing cancels.
    std::vector<double> exact_lower(order.size() + 1);
    exact_lower[0] = std::exp(static_cast<double>(steady_lse[g]) - shift);
    for (size_t r = 0; r < order.size(); ++r) {
      exact_lower[r + 1] = exact_lower[r] + std::exp(masses[order[r]].log_bounds.lower - shift);
    }
    for (size_t r = order.size();; --r) {
      bounds[r] = std::max(bounds[r], BoundOf(rest, exact_lower[r]));
      if (r == 0) break;
      rest.Add(masses[order[r - 1]], shift);
    }
  }
  return bounds;
}

}  // namespace wavekv
