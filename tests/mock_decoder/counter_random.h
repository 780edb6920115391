// Random numbers by counter: any element of any stream at once, the same on every machine.
//
// The distributions of <random> differ between standard libraries, and their state would make the
// order of generation matter; a counter has neither fault.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace wavekv::mock {

// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// The key of a stream named by a few numbers.
inline uint64_t StreamKey(std::initializer_list<uint64_t> names) {
  uint64_t key = 0;
  for (const uint64_t name : names) key = Mix(key ^ name);
  return key;
}

// Element `index` of a stream, uniform in [0, bound). The bias is below bound / 2^32.
inline uint64_t UniformAt(uint64_t key, uint64_t index, uint32_t bound) {
  return ((Mix(key + index) >> 32) * bound) >> 32;
}

// A normal deviate from one word: the sum of its four 16-bit uniforms, scaled to mean 0 and
// variance 1. Tails end at 3.5 sigma, which nothing here depends on.
inline float GaussFromWord(uint64_t word) {
  const uint32_t sum =
      static_cast<uint32_t>(word & 0xffff) + static_cast<uint32_t>((word >> 16) & 0xffff) +
      static_cast<uint32_t>((word >> 32) & 0xffff) + static_cast<uint32_t>(word >> 48);
  constexpr float kSqrt3 = 1.7320508f;  // 1 / sqrt(4 / 12)
  return (static_cast<float>(sum) * (1.0f / 65536.0f) - 2.0f) * kSqrt3;
}

// out[i] = scale * the i-th normal deviate of the stream.
inline void FillGauss(uint64_t key, size_t count, float scale, float* out) {
  for (size_t i = 0; i < count; ++i) {
    out[i] = scale * GaussFromWord(Mix(key + i * 0x9e3779b97f4a7c15ull));
  }
}

}  // namespace wavekv::mock
