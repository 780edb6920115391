// What is known of a cluster's true attention mass without reading its tokens.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "index/segment.h"

namespace wavekv {

// Natural log of a cluster size; sizes up to kClusterTokensMax come from a table.
float LogSize(uint16_t size);

// softmax_scale * |query|, rounded up: how much a score can change per unit of distance.
double QueryReach(std::span<const float> query, float scale);

// Bound of the error of a float32 score against any centroid of `segment`: a sum of key_dim
// products in any order, scaled.
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
