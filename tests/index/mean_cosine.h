// How good a clustering is, in one number.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/cluster/partition.h"

namespace wavekv {

// Mean cosine of points [count, dim] with the direction of their cluster's sum; 1 for a point, or a
// sum, that is zero.
inline double MeanCosine(std::span<const float> points, uint32_t dim,
                         const std::vector<ClusterMembers>& clusters) {
  double total = 0, count = 0;
  for (const ClusterMembers& members : clusters) {
    std::vector<double> sum(dim);
    for (const uint32_t m : members) {
      for (uint32_t j = 0; j < dim; ++j) sum[j] += points[size_t{m} * dim + j];
    }
    for (const uint32_t m : members) {
      double dot = 0, key = 0, mean = 0;
      for (uint32_t j = 0; j < dim; ++j) {
        const double x = points[size_t{m} * dim + j];
        dot += x * sum[j];
        key += x * x;
        mean += sum[j] * sum[j];
      }
      total += key > 0 && mean > 0 ? dot / std::sqrt(key * mean) : 1;
      count += 1;
    }
  }
  return total / count;
}

}  // namespace wavekv
