#include "index/token_sketch.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "storage/base/dtype.h"

namespace wavekv {
namespace {

// The smallest bf16 not below `value`, which is at least 0; the largest finite one at most.
uint16_t BF16NotBelow(float value) {
  constexpr uint16_t kLargest = 0x7f7f;
  uint16_t bits = FloatToBF16(value);
  if (BF16ToFloat(bits) < value) ++bits;
  return std::min(bits, kLargest);
}

uint64_t BytesOf(const RowCodes& rows) {
  return rows.codes.size() + rows.steps.size() * sizeof(rows.steps[0]);
}

}  // namespace

uint64_t TokenSketch::bytes() const {
  return BytesOf(keys) + BytesOf(values) + key_errors.size() * sizeof(key_errors[0]);
}

double AppendCodes(const float* difference, uint32_t dim, RowCodes* codes) {
  float largest = 0;
  for (uint32_t j = 0; j < dim; ++j) largest = std::max(largest, std::fabs(difference[j]));
  const uint16_t step_bits = BF16NotBelow(largest / kSketchCodeMiddle);
  const float step = BF16ToFloat(step_bits);
  // A row that is its mean has no step, and any code will do; a step too small to divide by is one.
  const bool tiny = step < std::numeric_limits<float>::min() * 16;
  const float per_step = tiny ? 0 : 1 / step;
  codes->steps.push_back(tiny ? 0 : step_bits);

  const size_t row_bytes = SketchRowBytes(dim);
  const size_t first = codes->codes.size();
  codes->codes.resize(first + row_bytes, 0);
  uint8_t* const row = codes->codes.data() + first;
  double error_squared = 0;
  for (uint32_t j = 0; j < dim; ++j) {
    const float exact = difference[j] * per_step + kSketchCodeMiddle;
    const auto code =
        static_cast<uint8_t>(std::clamp(exact + 0.5f, 0.0f, static_cast<float>(kSketchCodeMax)));
    const double sketched = tiny ? 0 : double{step} * (code - double{kSketchCodeMiddle});
    error_squared += (difference[j] - sketched) * (difference[j] - sketched);
    row[j % row_bytes] |= static_cast<uint8_t>(j < row_bytes ? code : code << kSketchBits);
  }
  return std::sqrt(error_squared);
}

}  // namespace wavekv
