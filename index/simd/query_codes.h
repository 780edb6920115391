// Queries in whole numbers, for exact products with 8-bit rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace wavekv::simd {

// 127 * 256 + 127: the largest number of two balanced digits of 8 bits.
inline constexpr int kQueryCodeMax = 32639;

// query[j] = step * code[j], to half a step. A code is 256 * high + low. Rows are padded with zeros
// to `padded_dim`, a multiple of 4. Sums of code * (0 to 255) fit 32 bits, modulo 2^32, up to 256
// dims.
struct QueryCodes {
  size_t group_size = 0;
  size_t padded_dim = 0;
  std::vector<float> steps;    // [group_size] largest |query[j]| / kQueryCodeMax; 0 for zeros
  std::vector<int32_t> sums;   // [group_size] of the codes
  std::vector<int16_t> codes;  // [group_size, padded_dim]
  std::vector<int8_t> high;    // [group_size, padded_dim]
  std::vector<int8_t> low;     // [group_size, padded_dim]

  // `queries` [group_size, dim], finite. Keeps the memory of what it held before.
  void Assign(std::span<const float> queries, size_t dim);
};

}  // namespace wavekv::simd
