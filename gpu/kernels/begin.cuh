// The first kernel of a step: latches what the manager published, appends the new token, and makes
// the queries ready for ranking.
//
// Centroids stay bytes there: a query becomes scale * (128 * high + low) with signed bytes high and
// low, which keeps 15 bits of its largest component, so that dot products are exact integers.
#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

inline constexpr int kBeginThreads = 512;
inline constexpr int kBeginWarps = kBeginThreads / 32;
inline constexpr int kLatchTries = 1000;
inline constexpr int kHeadWords = sizeof(HeadDescriptor) / sizeof(uint64_t);
static_assert(sizeof(HeadDescriptor) % sizeof(uint64_t) == 0 && kHeadWords <= kBeginThreads);

// The heads of a published descriptor; `torn` when the manager was writing all the time.
inline __device__ const HeadDescriptor* ReadPublished(const SequenceDescriptor* live, bool* torn) {
  for (int i = 0; i < kLatchTries; ++i) {
    uint32_t before, after;
    const HeadDescriptor* heads;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                 : "=r"(before)
                 : "l"(&live->version)
                 : "memory");
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                 : "=l"(heads)
                 : "l"(&live->heads)
                 : "memory");
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
                 : "=r"(after)
                 : "l"(&live->version)
                 : "memory");
    *torn = before % 2 != 0 || before != after;
    if (!*torn) return heads;
  }
  return nullptr;
}

// Copies the head's new row of keys and of values into the ring and advances it.
inline __device__ void Append(const Step& step, const HeadDescriptor& head, uint32_t unit) {
  HeadState* state = head.state;
  const uint64_t position = state->appended;
  const uint64_t oldest = head.steady_first / kBlockRows * kBlockRows;
  const bool fits = position >= oldest && position - oldest < head.steady_capacity;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (fits) {
      state->appended = position + 1;
    } else {
      ++state->overflows;
    }
  }
  if (!fits) return;
  const uint32_t words = step.shape.head_dim / 8;  // Of 16 bytes, in a row.
  const uint4* keys = static_cast<const uint4*>(step.inputs.new_keys) + size_t{unit} * words;
  const uint4* values = static_cast<const uint4*>(step.inputs.new_values) + size_t{unit} * words;
  const size_t row = position % head.steady_capacity * words;
  for (uint32_t i = threadIdx.x; i < words; i += kBeginThreads) {
    static_cast<uint4*>(head.steady_keys)[row + i] = keys[i];
    static_cast<uint4*>(head.steady_values)[row + i] = values[i];
  }
}

// Splits the queries into bytes; a warp a head. Heads beyond the group become zero.
template <typename T, int kDim>
__device__ void SplitQueries(const Step& step, uint32_t unit) {
  constexpr int kPerLane = kDim / 32;
  constexpr float kLargest = 16256;  // 127 * 128
  const uint32_t group = step.shape.group, lane = threadIdx.x % 32;
  const T* queries = static_cast<const T*>(step.inputs.queries) + size_t{unit} * group * kDim;
  int8_t* high = step.workspace.query_bytes + size_t{unit} * 2 * kGroupMax * kDim;
  int8_t* low = high + kGroupMax * kDim;
  for (uint32_t head = threadIdx.x / 32; head < kGroupMax; head += kBeginWarps) {
    float q[kPerLane], largest = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      q[i] = head < group ? ToFloat(queries[head * kDim + lane * kPerLane + i]) : 0;
      largest = fmaxf(largest, fabsf(q[i]));
    }
    largest = WarpMax(largest);
    const float to_integer = largest > 0 ? kLargest / largest : 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int whole = __float2int_rn(q[i] * to_integer);
      const int upper = (whole + 64) >> 7;  // Rounds to nearest: the rest is -64 to 63.
      high[head * kDim + lane * kPerLane + i] = static_cast<int8_t>(upper);
      low[head * kDim + lane * kPerLane + i] = static_cast<int8_t>(whole - 128 * upper);
    }
    if (lane == 0) step.workspace.query_scales[unit * kGroupMax + head] = largest / kLargest;
  }
}

template <typename T, int kDim>
__global__ void __launch_bounds__(kBeginThreads) BeginKernel(const __grid_constant__ Step step) {
  __shared__ HeadDescriptor head;
  __shared__ const HeadDescriptor* published;
  const uint32_t unit = blockIdx.x;
  HeadDescriptor* latched = step.workspace.heads + unit;
  if (threadIdx.x == 0) {
    bool torn;
    published = ReadPublished(step.inputs.live + unit / step.shape.kv_heads, &torn);
    if (published != nullptr) published += unit % step.shape.kv_heads;
    // What the last step latched is valid until a step has completed without it.
    if (torn) published = latched;
  }
  SplitQueries<T, kDim>(step, unit);
  __syncthreads();
  const HeadDescriptor* source = published;
  if (threadIdx.x < kHeadWords) {
    const uint64_t word =
        source == nullptr ? 0 : reinterpret_cast<const uint64_t*>(source)[threadIdx.x];
    reinterpret_cast<uint64_t*>(&head)[threadIdx.x] = word;
    reinterpret_cast<uint64_t*>(latched)[threadIdx.x] = word;
  }
  __syncthreads();
  if (step.inputs.new_keys != nullptr && head.state != nullptr) Append(step, head, unit);
}

}  // namespace wavekv::gpu
