// The selection kernel: grid (splits.select, units), thread block clusters of splits.select CTAs.
#pragma once

#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

inline constexpr int kSelectThreads = 1024;

// Dynamic shared memory: keys of the clusters that one CTA serves.
inline size_t SelectSharedBytes(const StepShape& shape, const StepSplits& splits) {
  const size_t tiles = shape.cluster_capacity / kClusterPad;
  return (tiles + splits.select - 1) / splits.select * kClusterPad * sizeof(uint32_t);
}

__global__ void SelectKernel(const __grid_constant__ Step step);

}  // namespace wavekv::gpu
