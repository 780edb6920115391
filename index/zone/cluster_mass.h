// What is known of a cluster's true attention mass without reading its tokens.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "index/segment.h"

namespace wavekv {

// The estimation zone may leave value means unread that hold together up to this share of each
// query head's estimated mass of the zone: the segment's mean value stands for them, their mass
// stays.
inline constexpr double kUnreadShareMax = 1e-2;

// Natural log of a cluster size; sizes up to kClusterTokensMax come from a table.
float LogSize(uint16_t size);

// softmax_scale * |query|, rounded up: how much a score can change per unit of distance.
double QueryReach(std::span<const float> query, float scale);

// Bound of the error of a score against any centroid of `segment` as RankClusters computes it.
double ScoreSlack(const SegmentHead& segment, double reach);

// The same for any sum of `dim` products, scaled, with a vector of length `norm`.
double SumSlack(uint32_t dim, double reach, double norm);

// Bounds of log(sum over the cluster's tokens of exp(score)).
struct LogMassBounds {
  double lower = 0;
  double upper = 0;
};

// From the score of the stored centroid c'. With the exact mean c and delta = |c - c'|, convexity
// gives mass >= size * exp(s q.c) >= size * exp(score - reach * delta); no key is farther from c'
// than the radius, so mass <= size * exp(score + reach * radius).
inline LogMassBounds BoundLogMass(float score, uint16_t size, float delta, float radius,
                                  double reach, double slack) {
  const double estimate = static_cast<double>(score) + LogSize(size);
  return {estimate - reach * delta - slack, estimate + reach * radius + slack};
}

}  // namespace wavekv
