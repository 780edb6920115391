// Attention in double over rows in memory: the oracle of the benchmarks.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace wavekv::bench {

struct ExactAnswer {
  std::vector<double> out;      // [value_dim]
  std::vector<double> weights;  // [tokens] softmax of the scores
};

// One query head [dim] over keys and values [tokens, dim].
ExactAnswer ExactAttention(std::span<const float> query, std::span<const float> keys,
                           std::span<const float> values, double scale);

// |found - exact| / |exact|.
double RelativeError(std::span<const float> found, std::span<const double> exact);

// bf16 rows as floats.
std::vector<float> ToFloats(std::span<const std::byte> rows);

}  // namespace wavekv::bench
