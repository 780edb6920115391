#include "storage/base/dtype.h"

#include <cstring>

namespace wavekv {

float F16ToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // Infinity or NaN.
    return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude < 0x400u) {  // Zero or subnormal: magnitude * 2^-24, exact in float.
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude + ((127u - 15u) << 10)) << 13));
}

uint16_t FloatToF16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // >= 65536
  if (magnitude < 0x38800000u) {                        // Below the smallest normal, 2^-14.
    // Adding 0.5 puts the result's last bit at 2^-24 and lets the FPU round to nearest even.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000u);
  }
  magnitude += 0xfffu + ((magnitude >> 13) & 1u);
  magnitude -= (127u - 15u) << 23;
  return sign | static_cast<uint16_t>(magnitude >> 13);  // Carries into infinity by itself.
}

void ConvertToFloat(DType dtype, const void* source, size_t count, float* target) {
  if (dtype == DType::kF32) {
    std::memcpy(target, source, count * sizeof(float));
    return;
  }
  const auto* bytes = static_cast<const std::byte*>(source);
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + i * 2, 2);
    target[i] = dtype == DType::kBF16 ? BF16ToFloat(bits) : F16ToFloat(bits);
  }
}

void ConvertFromFloat(DType dtype, const float* source, size_t count, void* target) {
  if (dtype == DType::kF32) {
    std::memcpy(target, source, count * sizeof(float));
    return;
  }
  auto* bytes = static_cast<std::byte*>(target);
  for (size_t i = 0; i < count; ++i) {
    const uint16_t bits = dtype == DType::kBF16 ? FloatToBF16(source[i]) : FloatToF16(source[i]);
    std::memcpy(bytes + i * 2, &bits, 2);
  }
}

namespace {

// Blocks without a way out in their middle become vector instructions: this reads every byte that
// is inserted. The exponent's lowest bit added to an exponent of all ones carries into the sign.
template <class Bits>
size_t FirstWithExponent(Bits exponent, const std::byte* bytes, size_t count) {
  constexpr size_t kBlock = 256 / sizeof(Bits);
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (sizeof(Bits) * 8 - 1));
  const Bits lowest = exponent & static_cast<Bits>(-exponent);
  size_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    Bits carried = 0;
    for (size_t j = i; j < i + kBlock; ++j) {
      Bits bits;
      std::memcpy(&bits, bytes + j * sizeof(Bits), sizeof bits);
      carried |= static_cast<Bits>((bits & exponent) + lowest);
    }
    if ((carried & kSign) != 0) break;
  }
  for (; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, bytes + i * sizeof(Bits), sizeof bits);
    if ((bits & exponent) == exponent) return i;
  }
  return count;
}

}  // namespace

size_t FirstNonFinite(DType dtype, const void* source, size_t count) {
  const auto* bytes = static_cast<const std::byte*>(source);
  switch (dtype) {
    case DType::kF32:
      return FirstWithExponent<uint32_t>(0x7f800000u, bytes, count);
    case DType::kF16:
      return FirstWithExponent<uint16_t>(0x7c00u, bytes, count);
    case DType::kBF16:
      return FirstWithExponent<uint16_t>(0x7f80u, bytes, count);
  }
  return count;
}

}  // namespace wavekv
