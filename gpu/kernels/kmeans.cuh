// The kernels of kmeans.h, for one element type and head dim.
#pragma once

#include "gpu/kernels/kmeans.h"
#include "gpu/kernels/mma.cuh"

namespace wavekv::gpu {

inline constexpr int kAssignThreads = 128;
inline constexpr int kAssignWarps = kAssignThreads / 32;
inline constexpr int kInitThreads = 1024;  // A CTA a task: they are few.
inline constexpr int kInitWarps = kInitThreads / 32;
inline constexpr int kUpdateThreads = 256;
inline constexpr int kUpdateWarps = kUpdateThreads / 32;
inline constexpr int kUpdateCtas = 4;  // Of a task; each has its share of the clusters.

// The dims of a row that a lane holds: kDim / 32 in a row.
template <typename T, int kDim>
struct LaneDims {
  static constexpr int kCount = kDim / 32;
  float x[kCount];

  static __device__ LaneDims Load(const T* row) {
    struct alignas(kCount * sizeof(T)) Piece {
      T x[kCount];
    };
    const Piece piece = reinterpret_cast<const Piece*>(row)[threadIdx.x % 32];
    LaneDims dims;
#pragma unroll
    for (int i = 0; i < kCount; ++i) dims.x[i] = ToFloat(piece.x[i]);
    return dims;
  }
};

// Adds up the task's keys number row_of(0) to row_of(count - 1), in this order; a warp's loads of
// several are in flight, also of the last few.
template <typename T, int kDim, typename RowOf>
__device__ LaneDims<T, kDim> SumKeys(const KMeansTask& task, uint32_t count, RowOf row_of) {
  const T* keys = static_cast<const T*>(task.keys);
  constexpr uint32_t kAtOnce = 8;
  constexpr int kCount = LaneDims<T, kDim>::kCount;
  LaneDims<T, kDim> sum = {};
  for (uint32_t i = 0; i < count; i += kAtOnce) {
    LaneDims<T, kDim> rows[kAtOnce];
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      rows[k] =
          LaneDims<T, kDim>::Load(keys + size_t{row_of(min(i + k, count - 1))} * task.key_stride);
    }
#pragma unroll
    for (uint32_t k = 0; k < kAtOnce; ++k) {
#pragma unroll
      for (int d = 0; d < kCount; ++d) sum.x[d] += i + k < count ? rows[k].x[d] : 0;
    }
  }
  return sum;
}

// Scales `sum` - n * mean to unit length, rounds it to centroid `c` of the task, and notes its
// offset. A sum without direction gives a centroid of zeros.
template <typename T, int kDim>
__device__ void WriteCentroid(const KMeansTask& task, uint32_t c, LaneDims<T, kDim> sum, float n) {
  constexpr int kCount = LaneDims<T, kDim>::kCount;
  const int lane = threadIdx.x % 32;
  float mean[kCount], squares = 0;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    mean[i] = task.mean[lane * kCount + i];
    sum.x[i] -= n * mean[i];
    squares += sum.x[i] * sum.x[i];
  }
  squares = WarpSum(squares);
  const float inverse = squares > 0 ? rsqrtf(squares) : 0;
  float offset = 0;
  T* centroid = static_cast<T*>(task.centroids) + size_t{c} * kDim + lane * kCount;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const T rounded = FromFloat<T>(sum.x[i] * inverse);
    centroid[i] = rounded;
    offset += ToFloat(rounded) * mean[i];
  }
  offset = WarpSum(offset);
  if (lane == 0) task.offsets[c] = offset;
}

// The mean of a task's keys, and evenly spaced keys as the first centroids. One CTA a task.
template <typename T, int kDim>
__global__ void __launch_bounds__(kInitThreads) KMeansInitKernel(const KMeansTask* tasks) {
  using Dims = LaneDims<T, kDim>;
  __shared__ float sums[kInitWarps][kDim];
  const KMeansTask task = tasks[blockIdx.x];
  const T* keys = static_cast<const T*>(task.keys);
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t own = (task.token_count + kInitWarps - 1 - warp) / kInitWarps;
  const Dims sum = SumKeys<T, kDim>(task, own, [&](uint32_t i) { return warp + kInitWarps * i; });
#pragma unroll
  for (int i = 0; i < Dims::kCount; ++i) sums[warp][lane * Dims::kCount + i] = sum.x[i];
  __syncthreads();
  for (uint32_t d = threadIdx.x; d < kDim; d += kInitThreads) {
    float total = 0;
    for (int w = 0; w < kInitWarps; ++w) total += sums[w][d];
    task.mean[d] = total / task.token_count;
  }
  __syncthreads();
  for (uint32_t c = warp; c < task.centroid_count; c += kInitWarps) {
    const uint32_t row = static_cast<uint64_t>(c) * task.token_count / task.centroid_count;
    WriteCentroid<T, kDim>(task, c, Dims::Load(keys + size_t{row} * task.key_stride), 1);
  }
}

// Labels of 64 or 128 tokens: the centroid with the largest dot product, the lowest among equals.
// Keys stay in registers as fragments; centroids pass through shared memory, 64 at a time, with the
// next ones under way.
template <typename T, int kDim>
struct Assigner {
  static constexpr int kRowTiles = kDim > 128 ? 1 : 2;  // Of 16 tokens, per warp.
  static constexpr int kTokens = 16 * kRowTiles * kAssignWarps;
  static constexpr int kLoads = kDim / 32;     // 16-byte loads of a row, per lane.
  static constexpr int kCentroids = 64;        // In shared memory at a time.
  static constexpr int kRowChunks = kDim / 8;  // 16-byte chunks of a row.

  struct Shared {
    uint4 centroids[2][kCentroids][kRowChunks];
    float offsets[kCentroidsMax];
  };

  // Of a row, chunk i lies at i ^ 4 in every second row: a quarter of a warp reads from two rows.
  static __device__ int Place(int row, int chunk) { return chunk ^ ((row & 1) << 2); }

  static __device__ void Fetch(const KMeansTask& task, uint32_t first,
                               uint4 (&to)[64][kRowChunks]) {
    for (int i = threadIdx.x; i < kCentroids * kRowChunks; i += kAssignThreads) {
      const int row = i / kRowChunks, chunk = i % kRowChunks;
      const uint4* from =
          static_cast<const uint4*>(task.centroids) + (first + row) * size_t{kRowChunks} + chunk;
      const auto target =
          static_cast<uint32_t>(__cvta_generic_to_shared(&to[row][Place(row, chunk)]));
      // Beyond the last centroid: zeros.
      const int bytes = first + row < task.centroid_count ? 16 : 0;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from),
                   "r"(bytes));
    }
    asm volatile("cp.async.commit_group;");
  }

  static __device__ void Run(const KMeansTask& task, uint32_t first_token, Shared* shared) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    Fetch(task, 0, shared->centroids[0]);
    for (uint32_t c = threadIdx.x; c < kCentroidsMax; c += kAssignThreads) {
      // A centroid that there is none of never wins.
      shared->offsets[c] = c < task.centroid_count ? task.offsets[c] : INFINITY;
    }
    const uint32_t row0 = first_token + 16 * kRowTiles * warp + g;
    const uint32_t stride_chunks = task.key_stride / 8;  // Of 16 bytes.
    uint4 keys[kRowTiles][2][kLoads];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t row = row0 + 16 * m + 8 * half;
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          keys[m][half][j] = uint4{};
          if (row < task.token_count) {
            keys[m][half][j] = __ldg(static_cast<const uint4*>(task.keys) +
                                     size_t{row} * stride_chunks + 4 * j + t);
          }
        }
      }
    }
    float best[kRowTiles][2];
    uint32_t label[kRowTiles][2];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      best[m][0] = best[m][1] = -INFINITY;
      label[m][0] = label[m][1] = 0;
    }
    int buffer = 0;
    for (uint32_t first = 0; first < task.centroid_count; first += kCentroids, buffer ^= 1) {
      asm volatile("cp.async.wait_group 0;");
      __syncthreads();
      if (first + kCentroids < task.centroid_count) {
        Fetch(task, first + kCentroids, shared->centroids[buffer ^ 1]);
      }
#pragma unroll 2
      for (int n = 0; n < kCentroids / 8; ++n) {
        const uint32_t c = first + 8 * n + 2 * t;
        const float offset0 = -shared->offsets[c], offset1 = -shared->offsets[c + 1];
        float dots[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          dots[m][0] = dots[m][2] = offset0;
          dots[m][1] = dots[m][3] = offset1;
        }
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          const uint4 b = shared->centroids[buffer][8 * n + g][Place(g, 4 * j + t)];
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            const uint4 &top = keys[m][0][j], &bottom = keys[m][1][j];
            Mma<T>({top.x, bottom.x, top.y, bottom.y}, b.x, b.y, dots[m]);
            Mma<T>({top.z, bottom.z, top.w, bottom.w}, b.z, b.w, dots[m]);
          }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            if (dots[m][r] > best[m][r / 2]) {
              best[m][r / 2] = dots[m][r];
              label[m][r / 2] = c + r % 2;
            }
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
          const float other = __shfl_xor_sync(kFullWarp, best[m][half], step);
          const uint32_t other_label = __shfl_xor_sync(kFullWarp, label[m][half], step);
          if (other > best[m][half] || (other == best[m][half] && other_label < label[m][half])) {
            best[m][half] = other;
            label[m][half] = other_label;
          }
        }
        const uint32_t row = row0 + 16 * m + 8 * half;
        if (t == 0 && row < task.token_count) {
          task.labels[row] = static_cast<uint16_t>(label[m][half]);
        }
      }
    }
  }
};

template <typename T, int kDim>
__global__ void __launch_bounds__(kAssignThreads) KMeansAssignKernel(const KMeansTask* tasks) {
  using Assign = Assigner<T, kDim>;
  extern __shared__ uint4 raw[];
  const KMeansTask task = tasks[blockIdx.y];
  const uint32_t first_token = blockIdx.x * Assign::kTokens;
  if (first_token >= task.token_count) return;
  Assign::Run(task, first_token, reinterpret_cast<typename Assign::Shared*>(raw));
}

// New centroids: the mean direction of each cluster's centred keys. A cluster that lost all its
// tokens keeps its centroid. grid (kUpdateCtas, tasks).
template <typename T, int kDim>
__global__ void __launch_bounds__(kUpdateThreads) KMeansUpdateKernel(const KMeansTask* tasks) {
  using Dims = LaneDims<T, kDim>;
  constexpr uint32_t kShare = kCentroidsMax / kUpdateCtas;
  __shared__ uint32_t counts[kShare], places[kShare];
  __shared__ uint16_t members[kSegmentTokensMax], sorted[kSegmentTokensMax];
  const KMeansTask task = tasks[blockIdx.y];
  const uint32_t first = blockIdx.x * kShare, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < kShare) counts[threadIdx.x] = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < task.token_count; i += kUpdateThreads) {
    const uint32_t c = task.labels[i] - first;
    if (c < kShare) atomicAdd(&counts[c], 1);
  }
  __syncthreads();
  if (warp == 0) {
    uint32_t before = 0;
    for (uint32_t base = 0; base < kShare; base += 32) {
      uint32_t inclusive = counts[base + lane];
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const uint32_t left = __shfl_up_sync(kFullWarp, inclusive, step);
        if (lane >= step) inclusive += left;
      }
      places[base + lane] = before + inclusive - counts[base + lane];
      before += __shfl_sync(kFullWarp, inclusive, 31);
    }
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < task.token_count; i += kUpdateThreads) {
    const uint32_t c = task.labels[i] - first;
    if (c < kShare) members[atomicAdd(&places[c], 1)] = static_cast<uint16_t>(i);
  }
  __syncthreads();
  for (uint32_t c = warp; c < kShare; c += kUpdateWarps) {
    const uint32_t n = counts[c], begin = places[c] - n;
    if (n == 0) continue;
    // Whatever order the atomics gave, sums are taken in order of the token.
    for (uint32_t i = lane; i < n; i += 32) {
      const uint16_t token = members[begin + i];
      uint32_t rank = 0;
      for (uint32_t k = 0; k < n; ++k) rank += members[begin + k] < token;
      sorted[begin + rank] = token;
    }
    __syncwarp();
    const Dims sum =
        SumKeys<T, kDim>(task, n, [&](uint32_t i) { return uint32_t{sorted[begin + i]}; });
    WriteCentroid<T, kDim>(task, first + c, sum, n);
  }
}

}  // namespace wavekv::gpu
