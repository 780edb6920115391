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

// The first warp latches and appends, the second sees offers, the others view segments.
inline constexpr int kViewWarps = 16;
inline constexpr int kBeginWarps = kViewWarps + 2;
inline constexpr int kBeginThreads = 32 * kBeginWarps;
inline constexpr int kLatchTries = 1000;
static_assert(kHeadWords <= 32, "a lane of the warp that latches has a word");

// A warp copies what is published for a unit to `head` and to the workspace. What the last step
// latched is valid until a step has completed without it: it stays when the manager was writing all
// the time.
inline __device__ void Latch(const Step& step, uint32_t unit, HeadDescriptor* head) {
  const uint32_t lane = threadIdx.x % 32;
  const SequenceDescriptor* live = step.inputs.live + unit / step.shape.kv_heads;
  auto* latched = reinterpret_cast<uint64_t*>(step.workspace.heads + unit);
  uint64_t word = 0;
  bool torn = true;
  for (int i = 0; torn && i < kLatchTries; ++i) {
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
    // Lanes may have read at different times: all go by what the first one has seen.
    before = __shfl_sync(kFullWarp, before, 0);
    heads = reinterpret_cast<const HeadDescriptor*>(
        __shfl_sync(kFullWarp, reinterpret_cast<unsigned long long>(heads), 0));
    __syncwarp();
    // Read while the version may change: what has been published stays as it is until a step that
    // began before has completed (step_layout.h).
    word = 0;
    if (before % 2 == 0 && heads != nullptr && lane < kHeadWords) {
      word = reinterpret_cast<const uint64_t*>(heads + unit % step.shape.kv_heads)[lane];
    }
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];"
                 : "=r"(after)
                 : "l"(&live->version)
                 : "memory");
    torn = __any_sync(kFullWarp, before % 2 != 0 || before != after);
  }
  if (lane >= kHeadWords) return;
  if (torn) word = latched[lane];
  reinterpret_cast<uint64_t*>(head)[lane] = word;
  latched[lane] = word;
}

// A warp copies the head's new row of keys and of values into the ring and advances it.
inline __device__ void Append(const Step& step, const HeadDescriptor& head, uint32_t unit) {
  const uint32_t lane = threadIdx.x % 32;
  const uint32_t words = step.shape.head_dim / 8;  // Of 16 bytes, in a row.
  uint4 key = {}, value = {};
  if (lane < words) {
    key = static_cast<const uint4*>(step.inputs.new_keys)[size_t{unit} * words + lane];
    value = static_cast<const uint4*>(step.inputs.new_values)[size_t{unit} * words + lane];
  }
  HeadState* state = head.state;
  const uint64_t position = state->appended;
  const uint64_t oldest = head.steady_first / kBlockRows * kBlockRows;
  const bool fits = position >= oldest && position - oldest < head.steady_capacity;
  __syncwarp();
  if (lane == 0) {
    if (fits) {
      state->appended = position + 1;
    } else {
      ++state->overflows;
    }
  }
  if (!fits || lane >= words) return;
  const size_t row = position % head.steady_capacity * words;
  static_cast<uint4*>(head.steady_keys)[row + lane] = key;
  static_cast<uint4*>(head.steady_values)[row + lane] = value;
}

// A warp takes what the slots on offer held out of the table; from here on the step may fill them.
// The manager may go on offering. Counters, ring and table lie where a client can write.
inline __device__ void SeeOffers(const HeadDescriptor& head) {
  constexpr uint32_t kAtOnce = 4;  // Of a lane.
  const uint32_t lane = threadIdx.x % 32;
  HeadState* state = head.state;
  const uint64_t seen = state->free_seen;
  uint64_t tail;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];"
               : "=l"(tail)
               : "l"(&state->free_tail)
               : "memory");
  tail = __shfl_sync(kFullWarp, tail, 0);
  __syncwarp();  // What the first lane has acquired is there for all.
  const uint64_t count = min(tail - seen, uint64_t{head.free_capacity});
  for (uint64_t first = lane; first < count; first += 32 * kAtOnce) {
    uint32_t slots[kAtOnce] = {}, blocks[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      blocks[i] = kNoBlock;
      if (first + 32 * i >= count) continue;
      const volatile FreeSlot& offer =
          head.free_slots[(seen + first + 32 * i) % head.free_capacity];
      slots[i] = offer.slot;
      blocks[i] = offer.block;
    }
    int32_t held[kAtOnce];
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      held[i] = blocks[i] < head.block_count ? head.block_slots[blocks[i]] : -1;
    }
#pragma unroll
    for (uint32_t i = 0; i < kAtOnce; ++i) {
      if (blocks[i] >= head.block_count || held[i] != static_cast<int32_t>(slots[i])) continue;
      head.block_slots[blocks[i]] = -1;
    }
  }
  __syncwarp();
  if (lane == 0) state->free_seen = tail;
}

// Splits the queries into bytes; all warps but the first, a head each. Heads beyond the group
// become zero.
template <typename T, int kDim>
__device__ void SplitQueries(const Step& step, uint32_t unit) {
  constexpr int kPerLane = kDim / 32;
  constexpr float kLargest = 16256;  // 127 * 128
  const uint32_t group = step.shape.group, lane = threadIdx.x % 32;
  const T* queries = static_cast<const T*>(step.inputs.queries) + size_t{unit} * group * kDim;
  int8_t* high = step.workspace.query_bytes + size_t{unit} * 2 * kGroupMax * kDim;
  int8_t* low = high + kGroupMax * kDim;
  for (uint32_t head = threadIdx.x / 32 - 1; head < kGroupMax; head += kBeginWarps - 1) {
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

// What each query head sees of each segment; warp `warp` of kViewWarps has some segments, whose
// loads are all in flight before the first is needed.
template <typename T, int kDim>
__device__ void ViewSegments(const Step& step, const HeadDescriptor& head, uint32_t unit,
                             uint32_t warp) {
  constexpr int kPerLane = kDim / 32, kAtOnce = 512 / kDim;
  constexpr uint32_t kHeadsAtOnce = 4;
  struct alignas(kPerLane < 4 ? 8 : 16) Piece {
    float x[kPerLane];
  };
  struct alignas(kPerLane * sizeof(T)) QueryPiece {
    T x[kPerLane];
  };
  const uint32_t group = step.shape.group, lane = threadIdx.x % 32;
  const uint32_t count = KnownSegments(step.shape, head);
  const T* rows = static_cast<const T*>(step.inputs.queries) + size_t{unit} * group * kDim;
  SegmentView* views = step.workspace.views + size_t{unit} * step.shape.segment_capacity * group;
  const float scale = step.shape.scale;
  constexpr float kSquaresMax = 1e30f;  // Times any spread it is no NaN.
  for (uint32_t first = warp; first < count; first += kAtOnce * kViewWarps) {
    Piece means[kAtOnce], shares[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const SegmentCopy& segment = head.segments[KnownSegment(first + i * kViewWarps, count)];
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
        const uint32_t segment = first + i * kViewWarps;
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
  const uint32_t unit = blockIdx.x, warp = threadIdx.x / 32;
  if (warp == 0) {
    Latch(step, unit, &head);
  } else {
    SplitQueries<T, kDim>(step, unit);
  }
  __syncthreads();
  if (warp == 0) {
    if (step.inputs.new_keys != nullptr && head.state != nullptr) Append(step, head, unit);
  } else if (warp == 1) {
    if (head.state != nullptr) SeeOffers(head);
  } else {
    ViewSegments<T, kDim>(step, head, unit, warp - 2);
  }
}

}  // namespace wavekv::gpu
