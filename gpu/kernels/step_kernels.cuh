// The kernels of a step that depend on element type and head dim. Which pairs there are is one
// list, in gpu/kernels/CMakeLists.txt: it makes a source of each, so that they compile side by
// side.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wavekv::gpu {

struct StepKernels {
  const void* begin;         // BeginKernel
  const void* rank;          // RankKernel
  const void* attend;        // AttendKernel
  size_t rank_shared_bytes;  // Dynamic, of a CTA.
  size_t attend_shared_bytes;
};

// For groups of `group` query heads, 1 to kGroupMax.
template <typename T, int kDim>
StepKernels KernelsFor(uint32_t group);

}  // namespace wavekv::gpu
