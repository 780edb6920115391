// From warps' accumulators to a CTA's partial result, and from partial results to the output.
#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

inline constexpr int kStepThreads = 128;  // Of the CTAs that rank and attend.
inline constexpr int kStepWarps = kStepThreads / 32;

template <int kDim, int kTiles>
struct CombineBuffer {
  float out[8 * kTiles][kDim];
  float max[kStepWarps][8 * kTiles];
  float sum[kStepWarps][8 * kTiles];
};

// Merges the accumulators of a CTA's warps and writes its partial result. `Warps` has out, max, sum
// and OutDim as WarpAttention does, sums finished. `out` [group, head_dim], `mass` [group].
template <int kDim, int kTiles, typename Warps>
__device__ void WritePartial(const Warps& warp, uint32_t group, CombineBuffer<kDim, kTiles>* buffer,
                             float* out, PartialMass* mass) {
  const int warp_idx = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  if (g == 0) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        buffer->max[warp_idx][8 * n + 2 * t + c] = warp.max[n][c];
        buffer->sum[warp_idx][8 * n + 2 * t + c] = warp.sum[n][c];
      }
    }
  }
  __syncthreads();
  for (int turn = 0; turn < kStepWarps; ++turn) {
    if (turn == warp_idx) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const int head = 8 * n + 2 * t + r % 2;
          float largest = kLogFloor;
          for (int w = 0; w < kStepWarps; ++w) largest = fmaxf(largest, buffer->max[w][head]);
          const float factor = Exp2(warp.max[n][r % 2] - largest);
#pragma unroll
          for (int m = 0; m < kDim / 16; ++m) {
            float& target = buffer->out[head][Warps::OutDim(m, g, r)];
            const float added = warp.out[n][m][r] * factor;
            target = turn == 0 ? added : target + added;
          }
        }
      }
    }
    __syncthreads();
  }
  for (uint32_t i = threadIdx.x; i < group * (kDim / 4); i += kStepThreads) {
    const uint32_t head = i / (kDim / 4), dim = i % (kDim / 4) * 4;
    *reinterpret_cast<float4*>(out + head * kDim + dim) =
        *reinterpret_cast<const float4*>(&buffer->out[head][dim]);
  }
  if (threadIdx.x < group) {
    float largest = kLogFloor, sum = 0;
    for (int w = 0; w < kStepWarps; ++w) largest = fmaxf(largest, buffer->max[w][threadIdx.x]);
    for (int w = 0; w < kStepWarps; ++w) {
      sum += buffer->sum[w][threadIdx.x] * Exp2(buffer->max[w][threadIdx.x] - largest);
    }
    mass[threadIdx.x] = {largest, sum};
  }
}

// The partial result of attention over nothing.
template <int kDim>
__device__ void WriteEmptyPartial(uint32_t group, float* out, PartialMass* mass) {
  for (uint32_t i = threadIdx.x; i < group * (kDim / 4); i += kStepThreads) {
    reinterpret_cast<float4*>(out)[i] = float4{};
  }
  if (threadIdx.x < group) mass[threadIdx.x] = {kLogFloor, 0};
}

inline constexpr uint32_t kPartialsMax = 96;  // Of a unit.

struct MergeBuffer {
  float weight[kGroupMax][kPartialsMax];
};

// Merges `count` (at most kPartialsMax) partial results of a unit by log-sum-exp. partial_out
// [count, group, kDim], partial_mass [count, group]; out [group, kDim], lse [group].
template <typename T, int kDim>
__device__ void MergePartials(const float* partial_out, const PartialMass* partial_mass,
                              uint32_t count, uint32_t group, MergeBuffer* buffer, T* out,
                              float* lse) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (uint32_t head = warp; head < group; head += kStepWarps) {
    float largest = kLogFloor;
    for (uint32_t p = lane; p < count; p += 32) {
      const float2 mass = __ldcg(reinterpret_cast<const float2*>(partial_mass + p * group + head));
      if (mass.y > 0) largest = fmaxf(largest, mass.x);
    }
    largest = WarpMax(largest);
    float total = 0;
    for (uint32_t p = lane; p < count; p += 32) {
      const float2 mass = __ldcg(reinterpret_cast<const float2*>(partial_mass + p * group + head));
      const float weight = mass.y > 0 ? Exp2(mass.x - largest) : 0;
      buffer->weight[head][p] = weight;
      total += weight * mass.y;
    }
    total = WarpSum(total);
    const float inverse = total > 0 ? 1 / total : 0;
    for (uint32_t p = lane; p < count; p += 32) buffer->weight[head][p] *= inverse;
    if (lane == 0) lse[head] = total > 0 ? (largest + __log2f(total)) * kLn2 : -INFINITY;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < group * (kDim / 4); i += kStepThreads) {
    const uint32_t head = i / (kDim / 4);
    const float4* part = reinterpret_cast<const float4*>(partial_out) + i;
    float4 total = {};
#pragma unroll 16
    for (uint32_t p = 0; p < count; ++p) {
      const float weight = buffer->weight[head][p];
      const float4 x = __ldcg(part + size_t{p} * group * (kDim / 4));
      total.x += weight * x.x;
      total.y += weight * x.y;
      total.z += weight * x.z;
      total.w += weight * x.w;
    }
    const uint2 packed = {PackPair<T>(total.x, total.y), PackPair<T>(total.z, total.w)};
    reinterpret_cast<uint2*>(out)[i] = packed;
  }
}

}  // namespace wavekv::gpu
