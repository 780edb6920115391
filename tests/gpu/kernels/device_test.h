// What every test that needs a device begins with.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <random>

namespace wavekv::gpu {

inline constexpr char kNoDevice[] = "no CUDA device: this test checked nothing";

inline bool HasDevice() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
}

// WAVEKV_TEST_SEED, or a fresh one.
inline uint64_t TestSeed() {
  const char* fixed = std::getenv("WAVEKV_TEST_SEED");
  return fixed != nullptr ? std::strtoull(fixed, nullptr, 10) : std::random_device{}();
}

}  // namespace wavekv::gpu
