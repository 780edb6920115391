// Fresh random inputs, the seed printed: WAVEKV_TEST_SEED repeats one.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace wavekv::shm {

inline uint64_t FreshSeed() {
  const char* const wanted = std::getenv("WAVEKV_TEST_SEED");
  const uint64_t seed = wanted == nullptr
                            ? (uint64_t{std::random_device()()} << 32) | std::random_device()()
                            : std::strtoull(wanted, nullptr, 10);
  std::cout << "seed " << seed << std::endl;
  return seed;
}

}  // namespace wavekv::shm
