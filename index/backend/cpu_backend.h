// The complete CPU backend.
#pragma once

#include <memory>

#include "index/backend/compute_backend.h"
#include "index/simd/kernels.h"

namespace wavekv {

// CreateCpuBackend() at a level of choice, for tests and benchmarks. `kernels` has static lifetime.
std::unique_ptr<ComputeBackend> CreateCpuBackend(const simd::Kernels& kernels);

}  // namespace wavekv
