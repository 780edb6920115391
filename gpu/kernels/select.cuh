// The selection kernel: grid (splits.select, units), thread block clusters of splits.select CTAs.
#pragma once

#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

inline constexpr int kSelectThreads = 1024;

// Dynamic shared memory: keys of the chunks that one CTA serves.
inline size_t SelectSharedBytes(const StepShape& shape, const StepSplits& splits) {
  const size_t chunks = (shape.chunk_capacity + splits.select - 1) / splits.select;
  return chunks * kChunkClusters * sizeof(uint32_t);
}

__global__ void SelectKernel(const __grid_constant__ Step step);

}  // namespace wavekv::gpu
