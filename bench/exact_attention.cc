#include "bench/exact_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "storage/base/dtype.h"

namespace wavekv::bench {

ExactAnswer ExactAttention(std::span<const float> query, std::span<const float> keys,
                           std::span<const float> values, double scale) {
  const size_t dim = query.size(), tokens = keys.size() / dim;
  ExactAnswer answer = {std::vector<double>(dim, 0), std::vector<double>(tokens)};
  double top = -std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < tokens; ++i) {
    double sum = 0;
    for (size_t j = 0; j < dim; ++j) sum += double{query[j]} * keys[i * dim + j];
    answer.weights[i] = scale * sum;
    top = std::max(top, answer.weights[i]);
  }
  double total = 0;
  for (size_t i = 0; i < tokens; ++i) {
    const double weight = answer.weights[i] = std::exp(answer.weights[i] - top);
    total += weight;
    for (size_t j = 0; j < dim; ++j) answer.out[j] += weight * values[i * dim + j];
  }
  for (double& x : answer.out) x /= total;
  for (double& x : answer.weights) x /= total;
  return answer;
}

double RelativeError(std::span<const float> found, std::span<const double> exact) {
  double difference = 0, norm = 0;
  for (size_t j = 0; j < exact.size(); ++j) {
    difference += (found[j] - exact[j]) * (found[j] - exact[j]);
    norm += exact[j] * exact[j];
  }
  return std::sqrt(difference / norm);
}

std::vector<float> ToFloats(std::span<const std::byte> rows) {
  std::vector<float> floats(rows.size() / 2);
  ConvertToFloat(DType::kBF16, rows.data(), floats.size(), floats.data());
  return floats;
}

}  // namespace wavekv::bench
