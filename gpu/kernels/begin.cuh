// The first kernel of a step: latches what the manager published, appends the new token, sees what
// slots are on offer, and makes the queries ready for ranking: their bytes, and what they see of
// whole segments.
//
// Centroids stay bytes there: a query becomes scale * (128 * high + low) with signed bytes high and
// low, which keeps 15 bits of its largest component, so that dot products are exact integers.
#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/segments.cuh"
#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

inline constexpr int kBeginThreads = 512;
inline constexpr int kBeginWarps = kBeginThreads / 32;
inline constexpr int kLatchTries = 1000;
static_assert(kHeadWords <= kBeginThreads);

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

// Takes what the slots on offer held out of the table; from here on the step may fill them. The
// manager may go on offering. Counters, ring and table lie where a client can write.
inline __device__ void SeeOffers(const HeadDescriptor& head) {
  __shared__ uint64_t tail;
  HeadState* state = head.state;
  if (threadIdx.x == 0) {
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
                 : "=l"(tail)
                 : "l"(&state->free_tail)
                 : "memory");
  }
  __syncthreads();
  const uint64_t seen = state->free_seen;
  const uint64_t count = min(tail - seen, uint64_t{head.free_capacity});
  for (uint64_t i = threadIdx.x; i < count; i += kBeginThreads) {
    const volatile FreeSlot& offer = head.free_slots[(seen + i) % head.free_capacity];
    const uint32_t slot = offer.slot, block = offer.block;
    if (block >= head.block_count) continue;
    if (head.block_slots[block] == static_cast<int32_t>(slot)) head.block_slots[block] = -1;
  }
  __syncthreads();
  if (threadIdx.x == 0) state->free_seen = tail;
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

// What each query head sees of each segment; a warp some segments, whose loads are all in flight
// before the first is needed.
template <typename T, int kDim>
__device__ void ViewSegments(const Step& step, const HeadDescriptor& head, uint32_t unit) {
  constexpr int kPerLane = kDim / 32, kAtOnce = 512 / kDim;
  constexpr uint32_t kHeadsAtOnce = 4;
  struct alignas(kPerLane < 4 ? 8 : 16) Piece {
    float x[kPerLane];
  };
  struct alignas(kPerLane * sizeof(T)) QueryPiece {
    T x[kPerLane];
  };
  const uint32_t group = step.shape.group, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t count = KnownSegments(step.shape, head);
  const T* rows = static_cast<const T*>(step.inputs.queries) + size_t{unit} * group * kDim;
  SegmentView* views = step.workspace.views + size_t{unit} * step.shape.segment_capacity * group;
  const float scale = step.shape.scale;
  constexpr float kSquaresMax = 1e30f;  // Times any spread it is no NaN.
  for (uint32_t first = warp; first < count; first += kAtOnce * kBeginWarps) {
    Piece means[kAtOnce], shares[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const SegmentCopy& segment = head.segments[KnownSegment(first + i * kBeginWarps, count)];
      means[i] = reinterpret_cast<const Piece*>(segment.key_mean)[lane];
      shares[i] = reinterpret_cast<const Piece*>(segment.spread_share)[lane];
    }
    for (uint32_t first_head = 0; first_head < group; first_head += kHeadsAtOnce) {
      QueryPiece queries[kHeadsAtOnce];
#pragma unroll
      for (uint32_t h = 0; h < kHeadsAtOnce; ++h) {
        queries[h] =
            reinterpret_cast<const QueryPiece*>(rows + min(first_head + h, group - 1) * kDim)[lane];
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t segment = first + i * kBeginWarps;
        if (segment >= count) break;
        float sums[2 * kHeadsAtOnce] = {};  // Of each head the dot product, then what it reaches.
#pragma unroll
        for (uint32_t h = 0; h < kHeadsAtOnce; ++h) {
#pragma unroll
          for (int d = 0; d < kPerLane; ++d) {
            const float q = ToFloat(queries[h].x[d]);
            sums[2 * h] += q * means[i].x[d];
            sums[2 * h + 1] += q * q * shares[i].x[d];
          }
        }
        const float sum = WarpSumOfEight(sums);
        const uint32_t h = first_head + lane / 8;
        if (lane % 4 != 0 || h >= group) continue;
        SegmentView& view = views[segment * group + h];
        (lane / 4 % 2 == 0 ? view.mean_dot : view.reach) =
            lane / 4 % 2 == 0 ? sum : scale * sqrtf(fminf(fmaxf(sum, 0), kSquaresMax));
      }
    }
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
  if (head.state != nullptr) SeeOffers(head);
  ViewSegments<T, kDim>(step, head, unit);
}

}  // namespace wavekv::gpu
