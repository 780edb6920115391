// Squared distances in double, as the statistics of clusters need them.
#pragma once

#include <cstdint>

namespace wavekv {

// |row - centre|^2. Sums of every eighth dimension are taken on their own, which lets the compiler
// use vectors without changing the order of any sum.
inline double SquaredDistance(const float* row, const double* centre, uint32_t dim) {
  constexpr uint32_t kWidth = 8;
  double sums[kWidth] = {};
  uint32_t j = 0;
  for (; j + kWidth <= dim; j += kWidth) {
    for (uint32_t lane = 0; lane < kWidth; ++lane) {
      const double difference = row[j + lane] - centre[j + lane];
      sums[lane] += difference * difference;
    }
  }
  for (; j < dim; ++j) sums[0] += (row[j] - centre[j]) * (row[j] - centre[j]);
  for (uint32_t lane = 1; lane < kWidth; ++lane) sums[0] += sums[lane];
  return sums[0];
}

}  // namespace wavekv
