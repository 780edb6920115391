#include "storage/base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <vector>

namespace wavekv {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

uint64_t FreshSeed() {
  const char* const wanted = std::getenv("WAVEKV_TEST_SEED");
  const uint64_t seed =
      wanted == nullptr ? std::random_device()() : std::strtoull(wanted, nullptr, 10);
  std::cout << "seed " << seed << std::endl;
  return seed;
}

// One at a time, by the arithmetic of the conversion.
size_t FirstNonFiniteOracle(DType dtype, const std::byte* bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    float value;
    ConvertToFloat(dtype, bytes + i * DTypeBytes(dtype), 1, &value);
    if (!std::isfinite(value)) return i;
  }
  return count;
}

// Bits of every kind: about one in `rarity` elements gets an exponent of all ones.
std::vector<std::byte> RandomBits(DType dtype, size_t count, uint64_t rarity,
                                  std::mt19937_64* random) {
  std::vector<std::byte> bytes(count * DTypeBytes(dtype));
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = static_cast<uint32_t>((*random)());
    const uint32_t exponent = dtype == DType::kF32   ? 0x7f800000u
                              : dtype == DType::kF16 ? 0x7c00u
                                                     : 0x7f80u;
    const bool wanted = (*random)() % rarity == 0;
    if (wanted) {
      bits |= exponent;
    } else if ((bits & exponent) == exponent) {
      bits &= ~(exponent & (exponent << 1));  // The largest finite ones.
    }
    std::memcpy(&bytes[i * DTypeBytes(dtype)], &bits, DTypeBytes(dtype));
  }
  return bytes;
}

TEST(FirstNonFiniteTest, FindsTheFirst) {
  std::mt19937_64 random(FreshSeed());
  for (int round = 0; round < 3000; ++round) {
    for (const DType dtype : kDTypes) {
      const size_t count = random() % 700;
      const std::vector<std::byte> bytes = RandomBits(dtype, count, 1 + random() % 900, &random);
      ASSERT_EQ(FirstNonFinite(dtype, bytes.data(), count),
                FirstNonFiniteOracle(dtype, bytes.data(), count));
    }
  }
}

// Alone, at every place of a few blocks and their rest.
TEST(FirstNonFiniteTest, MissesNoPlace) {
  constexpr size_t kCount = 300;
  std::mt19937_64 random(FreshSeed());
  for (const DType dtype : kDTypes) {
    std::vector<std::byte> bytes = RandomBits(dtype, kCount, UINT64_MAX, &random);
    ASSERT_EQ(FirstNonFinite(dtype, bytes.data(), kCount), kCount);
    for (const float bad : {INFINITY, -INFINITY, NAN, -NAN}) {
      for (size_t i = 0; i < kCount; ++i) {
        std::byte* const at = &bytes[i * DTypeBytes(dtype)];
        std::byte before[4];
        std::memcpy(before, at, DTypeBytes(dtype));
        ConvertFromFloat(dtype, &bad, 1, at);
        EXPECT_EQ(FirstNonFinite(dtype, bytes.data(), kCount), i) << DTypeName(dtype);
        std::memcpy(at, before, DTypeBytes(dtype));
      }
    }
  }
}

}  // namespace
}  // namespace wavekv
