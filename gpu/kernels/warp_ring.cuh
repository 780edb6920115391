// Copies from global to shared memory that a warp has under way while it computes.
//
// A warp owns a ring of stages. It asks for stage i + kDepth - 1 before it uses stage i, so that
// kDepth - 1 of them fly at any time, without registers. Only the warp itself waits.
#pragma once

#include <cstdint>

namespace wavekv::gpu {

__device__ inline uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// 16 bytes, both addresses multiples of 16.
__device__ inline void CopyAhead(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(SharedAddress(shared)), "l"(global)
               : "memory");
}

// Closes a group of this lane's copies; one group a stage, also when it is empty.
__device__ inline void CloseCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `kPending` groups of the whole warp are there.
template <int kPending>
__device__ inline void AwaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
  __syncwarp();
}

}  // namespace wavekv::gpu
