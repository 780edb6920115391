// From warps' accumulators to a CTA's partial result, and from partial results to the output.
#pragma once

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

inline constexpr int kStepThreads = 128;  // Of the CTAs that rank and attend.
inline constexpr int kStepWarps = kStepThreads / 32;

template <int kDim, int kTiles>
struct CombineBuffer {
  static constexpr int kStride = kDim + 4;  // Spreads the heads over the banks.
  alignas(16) float out[kStepWarps][8 * kTiles][kStride];
  float max[kStepWarps][8 * kTiles];
  float sum[kStepWarps][8 * kTiles];
};

// Merges the accumulators of a CTA's warps and writes its partial result. `Warps` has out, max, sum
// and OutDim as WarpAttention does, sums finished; accumulators of an even row tile and the next
// are four dims in a row. `out` [group, head_dim], `mass` [group].
template <int kDim, int kTiles, typename Warps>
__device__ void WritePartial(const Warps& warp, uint32_t group, CombineBuffer<kDim, kTiles>* buffer,
                             float* out, PartialMass* mass) {
  const int warp_idx = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t head = 8 * n + 2 * t + c;
      if (head >= group) continue;
      if (g == 0) {
        buffer->max[warp_idx][head] = warp.max[n][c];
        buffer->sum[warp_idx][head] = warp.sum[n][c];
      }
#pragma unroll
      for (int m = 0; m < kDim / 16; m += 2) {
        *reinterpret_cast<float4*>(&buffer->out[warp_idx][head][Warps::OutDim(m, g, 0)]) = {
            warp.out[n][m][c], warp.out[n][m][2 + c], warp.out[n][m + 1][c],
            warp.out[n][m + 1][2 + c]};
      }
    }
  }
  __syncthreads();
  const auto largest_of = [&](uint32_t head) {
    float largest = kLogFloor;
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) largest = fmaxf(largest, buffer->max[w][head]);
    return largest;
  };
  for (uint32_t i = threadIdx.x; i < group * (kDim / 4); i += kStepThreads) {
    const uint32_t head = i / (kDim / 4), dim = i % (kDim / 4) * 4;
    const float largest = largest_of(head);
    float4 total = {};
#pragma unroll
    for (int w = 0; w < kStepWarps; ++w) {
      const float factor = Exp2(buffer->max[w][head] - largest);
      const float4 x = *reinterpret_cast<const float4*>(&buffer->out[w][head][dim]);
      total.x += factor * x.x;
      total.y += factor * x.y;
      total.z += factor * x.z;
      total.w += factor * x.w;
    }
    reinterpret_cast<float4*>(out)[i] = total;
  }
  if (threadIdx.x < group) {
    const float largest = largest_of(threadIdx.x);
    float sum = 0;
#pragma unroll
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
