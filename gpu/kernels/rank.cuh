// Ranking: logits of every cluster for the whole group, on tensor cores, and attention over the
// steady zone, whose mass the ranks are relative to.
#pragma once

#include "gpu/kernels/partials.cuh"
#include "gpu/kernels/row_attention.cuh"

namespace wavekv::gpu {

// Ranks one chunk: 16 clusters a warp and turn. All rows are requested before the first is used.
template <int kDim, int kTiles>
struct ChunkRanker {
  static constexpr int kLoads = kDim / 64;  // 16-byte loads of a centroid, per lane.
  static constexpr int kTurns = kChunkClusters / 16 / kStepWarps;
  // As many turns in flight as fit in registers.
  static constexpr int kAhead = kDim > 128 ? 2 : kTurns;

  struct Shared {
    float max[kStepWarps][8 * kTiles];
    float sum[kStepWarps][8 * kTiles];
  };

  // Lane (g, t): bytes 64 j + 16 t of centroids g and g + 8, their scales and sizes.
  struct Rows {
    uint4 bytes[2][kLoads];
    float scale[2];
    uint16_t size[2];
  };

  // The queries as the second operand: lane (g, t) holds bytes 64 j + 16 t of head 8 n + g.
  struct Queries {
    uint4 high[kLoads], low[kLoads];
    float scale[2], mean_dot[2];  // Of heads 8 n + 2t + {0, 1}.
  };

  static __device__ Rows Load(const HeadDescriptor& head, uint32_t first) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Rows rows;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t cluster = first + g + 8 * half;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        rows.bytes[half][j] =
            LoadOnce(head.centroids + static_cast<size_t>(cluster) * kDim + 64 * j + 16 * t);
      }
      rows.scale[half] = __ldg(head.centroid_scales + cluster);
      rows.size[half] = __ldg(head.sizes + cluster);
    }
    return rows;
  }

  static __device__ Queries LoadQueries(const Step& step, uint32_t unit, uint32_t segment, int n) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int8_t* high =
        step.workspace.query_bytes + (size_t{unit} * 2 * kGroupMax + 8 * n + g) * kDim + 16 * t;
    Queries queries;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      queries.high[j] = *reinterpret_cast<const uint4*>(high + 64 * j);
      queries.low[j] = *reinterpret_cast<const uint4*>(high + kGroupMax * kDim + 64 * j);
    }
    const uint32_t group = step.shape.group;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t head = 8 * n + 2 * t + c;
      queries.scale[c] = step.workspace.query_scales[unit * kGroupMax + head];
      queries.mean_dot[c] = 0;
      if (head < group) {
        const size_t view = (size_t{unit} * step.shape.segment_capacity + segment) * group + head;
        queries.mean_dot[c] = step.workspace.views[view].mean_dot;
      }
    }
    return queries;
  }

  // Logits of clusters g and g + 8 for the heads 8 n + 2t + {0, 1}.
  static __device__ void Score(const Rows& rows, const Queries& queries, float scale,
                               float (&scores)[4]) {
    int high[4] = {}, low[4] = {};
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint4 &top = rows.bytes[0][j], &bottom = rows.bytes[1][j];
      const uint4 &qh = queries.high[j], &ql = queries.low[j];
      MmaS8({top.x, bottom.x, top.y, bottom.y}, qh.x, qh.y, high);
      MmaS8({top.x, bottom.x, top.y, bottom.y}, ql.x, ql.y, low);
      MmaS8({top.z, bottom.z, top.w, bottom.w}, qh.z, qh.w, high);
      MmaS8({top.z, bottom.z, top.w, bottom.w}, ql.z, ql.w, low);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float dot = static_cast<float>(128 * high[r] + low[r]) * queries.scale[r % 2];
      const uint16_t size = rows.size[r / 2];
      const float log_size = size == 0 ? -INFINITY : __log2f(static_cast<float>(size));
      scores[r] = scale * (dot * rows.scale[r / 2] + queries.mean_dot[r % 2]) + log_size;
    }
  }

  static __device__ void Run(const Step& step, const HeadDescriptor& head, uint32_t unit,
                             uint32_t chunk_idx, Shared* shared) {
    const uint32_t group = step.shape.group, warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const ClusterChunk chunk = head.chunks[chunk_idx];
    const size_t stride = step.shape.cluster_capacity;
    float* logits = step.workspace.logits + unit * group * stride;
    const float scale = step.shape.scale * kLog2E;
    float max[kTiles][2], sum[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      max[n][0] = max[n][1] = kLogFloor;
      sum[n][0] = sum[n][1] = 0;
    }
#pragma unroll
    for (int base = 0; base < kTurns; base += kAhead) {
      Rows rows[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const uint32_t at = 16 * (warp + kStepWarps * (base + i));
        if (at < chunk.cluster_count) rows[i] = Load(head, chunk.first_cluster + at);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const Queries queries = LoadQueries(step, unit, chunk.segment, n);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          const uint32_t at = 16 * (warp + kStepWarps * (base + i));
          if (at >= chunk.cluster_count) continue;
          float scores[4];
          Score(rows[i], queries, scale, scores);
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const uint32_t h = 8 * n + 2 * t + r % 2;
            const uint32_t cluster = chunk.first_cluster + at + g + 8 * (r / 2);
            if (h < group) logits[h * stride + cluster] = scores[r];
          }
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const float largest = fmaxf(max[n][c], fmaxf(scores[c], scores[2 + c]));
            sum[n][c] = sum[n][c] * Exp2(max[n][c] - largest) + Exp2(scores[c] - largest) +
                        Exp2(scores[2 + c] - largest);
            max[n][c] = largest;
          }
        }
      }
    }
    WriteMass(
        max, sum, group, shared,
        step.workspace.chunk_mass + (size_t{unit} * step.shape.chunk_capacity + chunk_idx) * group);
  }

  // Sums over the lanes and warps.
  static __device__ void WriteMass(const float (&max)[kTiles][2], const float (&sum)[kTiles][2],
                                   uint32_t group, Shared* shared, PartialMass* mass) {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float largest = RowsMax(max[n][c]);
        const float total = RowsSum(sum[n][c] * Exp2(max[n][c] - largest));
        if (lane < 4) {
          shared->max[warp][8 * n + 2 * t + c] = largest;
          shared->sum[warp][8 * n + 2 * t + c] = total;
        }
      }
    }
    __syncthreads();
    if (threadIdx.x < group) {
      const uint32_t h = threadIdx.x;
      float largest = kLogFloor, total = 0;
      for (int w = 0; w < kStepWarps; ++w) largest = fmaxf(largest, shared->max[w][h]);
      for (int w = 0; w < kStepWarps; ++w) {
        total += shared->sum[w][h] * Exp2(shared->max[w][h] - largest);
      }
      mass[h] = {largest, total};
    }
  }
};

// Attention over every splits.steady-th 16 rows of the steady zone: sinks first, then the ring.
template <typename T, int kDim, int kTiles>
struct SteadyAttention {
  struct Shared {
    QueryFragments<kDim, kTiles> queries;
    CombineBuffer<kDim, kTiles> combine;
  };

  // Stretch `i` of the zone; empty beyond its end.
  static __device__ RowStretch Stretch(const HeadDescriptor& head, uint64_t steady_end,
                                       uint64_t i) {
    RowStretch stretch;
    const uint64_t sinks = (head.sink_count + kBlockRows - 1) / kBlockRows;
    if (i < sinks) {
      const size_t offset = i * kBlockRows * kDim * sizeof(T);
      stretch.keys = static_cast<const char*>(head.sink_keys) + offset;
      stretch.values = static_cast<const char*>(head.sink_values) + offset;
      stretch.end = min(kBlockRows, static_cast<uint32_t>(head.sink_count - i * kBlockRows));
      return stretch;
    }
    const uint64_t first = (head.steady_first / kBlockRows + i - sinks) * kBlockRows;
    if (first >= steady_end) return stretch;
    const size_t offset = first % head.steady_capacity * kDim * sizeof(T);
    stretch.keys = static_cast<const char*>(head.steady_keys) + offset;
    stretch.values = static_cast<const char*>(head.steady_values) + offset;
    stretch.begin = first < head.steady_first ? head.steady_first - first : 0;
    stretch.end = min(uint64_t{kBlockRows}, steady_end - first);
    return stretch;
  }

  static __device__ void Run(const Step& step, const HeadDescriptor& head, uint32_t unit,
                             uint32_t split, Shared* shared) {
    const uint32_t group = step.shape.group;
    const uint64_t steady_end = head.state == nullptr ? 0 : head.state->appended;
    const size_t partial = size_t{unit} * (step.splits.steady + step.splits.misses +
                                           step.splits.hits + step.splits.estimate) +
                           split;
    PartialMass* mass = step.workspace.partial_mass + partial * group;
    LoadQueryFragments(static_cast<const T*>(step.inputs.queries) + size_t{unit} * group * kDim,
                       group, &shared->queries);
    __syncthreads();
    WarpAttention<T, kDim, kTiles> warp;
    warp.Clear();
    const float scale = step.shape.scale * kLog2E;
    const uint64_t stride = 2 * kStepWarps * step.splits.steady;
    for (uint64_t i = 2 * (split * kStepWarps + threadIdx.x / 32);; i += stride) {
      const RowStretch stretches[2] = {Stretch(head, steady_end, i),
                                       Stretch(head, steady_end, i + 1)};
      if (stretches[0].end == 0) break;
      warp.Add(stretches, shared->queries, scale);
    }
    warp.Finish();
    WritePartial(warp, group, &shared->combine, step.workspace.partial_out + partial * group * kDim,
                 mass);
  }
};

template <typename T, int kDim, int kTiles>
__global__ void __launch_bounds__(kStepThreads)
    RankKernel(const __grid_constant__ Step step, uint32_t first_unit) {
  __shared__ union {
    typename ChunkRanker<kDim, kTiles>::Shared rank;
    typename SteadyAttention<T, kDim, kTiles>::Shared steady;
  } shared;
  const uint32_t unit = first_unit + blockIdx.y;
  const HeadDescriptor& head = step.workspace.heads[unit];
  if (blockIdx.x < step.splits.steady) {
    SteadyAttention<T, kDim, kTiles>::Run(step, head, unit, blockIdx.x, &shared.steady);
  } else if (const uint32_t chunk = blockIdx.x - step.splits.steady; chunk < head.chunk_count) {
    ChunkRanker<kDim, kTiles>::Run(step, head, unit, chunk, &shared.rank);
  }
}

}  // namespace wavekv::gpu
