// Element types and their conversions. Everything is little endian.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace wavekv {

enum class DType : uint8_t { kF32 = 1, kF16 = 2, kBF16 = 3 };

constexpr size_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

constexpr std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
  }
  return "unknown";
}

// Bits of a bfloat16 as float; exact.
inline float BF16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest even; NaN stays NaN; overflow becomes infinity.
inline uint16_t FloatToBF16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}

// IEEE binary16; subnormals, infinities and NaN included.
float F16ToFloat(uint16_t bits);
// Rounds to nearest even; overflow becomes infinity.
uint16_t FloatToF16(float value);

// Converts `count` elements at `source` (any alignment of the element) to float.
void ConvertToFloat(DType dtype, const void* source, size_t count, float* target);
// Converts `count` floats to `dtype`, rounding to nearest even.
void ConvertFromFloat(DType dtype, const float* source, size_t count, void* target);

// Index of the first NaN or infinity among `count` elements, or `count` when all are finite.
size_t FirstNonFinite(DType dtype, const void* source, size_t count);

}  // namespace wavekv
