#include "index/simd/query_codes.h"

#include <algorithm>
#include <cmath>

namespace wavekv::simd {

void QueryCodes::Assign(std::span<const float> queries, size_t dim) {
  group_size = queries.size() / dim;
  padded_dim = (dim + 3) / 4 * 4;
  steps.assign(group_size, 0);
  sums.assign(group_size, 0);
  codes.assign(group_size * padded_dim, 0);
  high.assign(codes.size(), 0);
  low.assign(codes.size(), 0);
  for (size_t g = 0; g < group_size; ++g) {
    const std::span<const float> query = queries.subspan(g * dim, dim);
    float largest = 0;
    for (const float x : query) largest = std::max(largest, std::abs(x));
    steps[g] = largest / kQueryCodeMax;
    if (steps[g] == 0) continue;  // Zeros, or too small for the step to be a float.
    for (size_t j = 0; j < dim; ++j) {
      // Rounding of the step itself may reach one beyond the largest code.
      const auto code = static_cast<int32_t>(
          std::clamp<float>(std::nearbyint(query[j] / steps[g]), -kQueryCodeMax, kQueryCodeMax));
      const int32_t digit = ((code + 128) & 255) - 128;  // -128 to 127
      const size_t at = g * padded_dim + j;
      codes[at] = static_cast<int16_t>(code);
      low[at] = static_cast<int8_t>(digit);
      high[at] = static_cast<int8_t>((code - digit) / 256);
      sums[g] += code;
    }
  }
}

}  // namespace wavekv::simd
