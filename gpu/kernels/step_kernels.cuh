// The kernels of a step that depend on element type and head dim. Which pairs there are is one
// list, in gpu/kernels/CMakeLists.txt: it makes a source of each, so that they compile side by
// side.
#pragma once

#include <cstdint>

namespace wavekv::gpu {

struct StepKernels {
  const void* begin;   // BeginKernel
  const void* rank;    // RankKernel
  const void* attend;  // AttendKernel
};

// For groups of up to 8 * tiles query heads, tiles 1 or 2.
template <typename T, int kDim>
StepKernels KernelsFor(uint32_t tiles);

}  // namespace wavekv::gpu
