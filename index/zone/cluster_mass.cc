#include "index/zone/cluster_mass.h"

#include <array>

#include "index/simd/query_codes.h"

namespace wavekv {
namespace {

// Unit round-off of float32, and of what rounds a double sum of squares.
constexpr double kFloatUnit = 0x1p-24;
constexpr double kReachSlack = 1e-6;

std::array<float, kClusterTokensMax + 1> MakeLogTable() {
  std::array<float, kClusterTokensMax + 1> table{};
  for (uint32_t size = 0; size <= kClusterTokensMax; ++size) {
    table[size] = static_cast<float>(std::log(static_cast<double>(size)));
  }
  return table;
}

}  // namespace

float LogSize(uint16_t size) {
  static const std::array<float, kClusterTokensMax + 1> table = MakeLogTable();
  if (size <= kClusterTokensMax) return table[size];
  return static_cast<float>(std::log(static_cast<double>(size)));
}

double QueryReach(std::span<const float> query, float scale) {
  double sum = 0;
  for (const float x : query) sum += static_cast<double>(x) * x;
  return std::sqrt(sum) * scale * (1 + kReachSlack);
}

double ScoreSlack(const SegmentHead& segment, double reach) {
  // A score is the sum of q.mean and q'.deviation, q' the query in steps of max |q_j| /
  // kQueryCodeMax. The second sum is exact but for a few roundings that scale it and add it.
  const double rounding = SumSlack(segment.key_dim + 4, reach, segment.key_mean_norm) +
                          8 * kFloatUnit * reach * segment.deviation_norm_max;
  // |q - q'| is at most half a step in each dim, and no |q_j| is above |q|.
  const double coarseness =
      reach * std::sqrt(static_cast<double>(segment.key_dim)) / (2.0 * simd::kQueryCodeMax);
  return rounding + 1.01 * coarseness * segment.deviation_norm_max;
}

double SumSlack(uint32_t dim, double reach, double norm) {
  // n products summed in any order err by at most n u / (1 - n u) of the sum of magnitudes, which
  // is at most |q| norm; two more roundings scale it and round log(size), whose own size is < 8.
  const double roundings = dim + 4.0;
  return 1.01 * kFloatUnit * (roundings * reach * norm + 8.0);
}

}  // namespace wavekv
