// Attention over the retrieved blocks and the estimated clusters of a unit, and the merge of all.
//
// A CTA is one split of one part of one unit: all units' misses first, because what they wait for
// (the bus) takes longest; then hits; then the estimation zone. The last CTA of a unit to finish
// merges its partial results. grid (units, splits).
#pragma once

#include "gpu/kernels/partials.cuh"
#include "gpu/kernels/row_attention.cuh"

namespace wavekv::gpu {

// Exact attention over every splits-th pair of blocks of a list.
template <typename T, int kDim, int kTiles>
struct BlockAttention {
  struct Shared {
    QueryFragments<kDim, kTiles> queries;
    CombineBuffer<kDim, kTiles> combine;
  };

  // `blocks` [count], walked in steps of `direction` (1 or -1) from the first.
  static __device__ void Run(const Step& step, const HeadDescriptor& head, uint32_t unit,
                             const BlockRef* blocks, int direction, uint32_t count, uint32_t split,
                             uint32_t splits, Shared* shared, float* out, PartialMass* mass) {
    const uint32_t group = step.shape.group;
    const uint32_t first = 2 * (split * kStepWarps + threadIdx.x / 32);
    if (2 * split * kStepWarps >= count) {
      WriteEmptyPartial<kDim>(group, out, mass);
      return;
    }
    BlockRef refs[2];
    ReadPair(blocks, direction, count, first, refs);
    LoadQueryFragments(static_cast<const T*>(step.inputs.queries) + size_t{unit} * group * kDim,
                       group, &shared->queries);
    __syncthreads();
    WarpAttention<T, kDim, kTiles> warp;
    warp.Clear();
    const float scale = step.shape.scale * kLog2E;
    for (uint32_t i = first; i < count; i += 2 * kStepWarps * splits) {
      const RowStretch stretches[2] = {Stretch(head, refs[0]), Stretch(head, refs[1])};
      ReadPair(blocks, direction, count, i + 2 * kStepWarps * splits, refs);
      warp.Add(stretches, shared->queries, scale);
    }
    warp.Finish();
    WritePartial(warp, group, &shared->combine, out, mass);
  }

 private:
  static __device__ void ReadPair(const BlockRef* blocks, int direction, uint32_t count, uint32_t i,
                                  BlockRef (&refs)[2]) {
#pragma unroll
    for (uint32_t s = 0; s < 2; ++s) {
      refs[s] = {nullptr, nullptr, 0, -1};
      if (i + s < count) refs[s] = blocks[direction * static_cast<int64_t>(i + s)];
    }
  }

  static __device__ RowStretch Stretch(const HeadDescriptor& head, const BlockRef& ref) {
    RowStretch stretch;
    stretch.keys = static_cast<const char*>(ref.keys);
    stretch.values = static_cast<const char*>(ref.values);
    stretch.end = ref.row_count;
    if (ref.fill_slot >= 0) {
      constexpr size_t kSlotBytes = 2 * kBlockRows * kDim * sizeof(T);
      stretch.fill = static_cast<char*>(head.slots) + ref.fill_slot * kSlotBytes;
    }
    return stretch;
  }
};

// The estimation zone: each cluster stands in as one token with its mean value and the weight
// 2^(logit - mass of all clusters), which is at most 1: no running maximum is needed.
//
// Value means stay bytes until they are exact float16 operands; their scale goes into the weight.
template <typename T, int kDim, int kTiles>
struct EstimateAttention {
  static constexpr int kLoads = kDim > 128 ? kDim / 128 : 1;  // Per lane and cluster, of
  static constexpr int kWords = kDim / 32 / kLoads;           // so many words.
  static constexpr float kWeightScale = 1024;  // Keeps small weights out of float16's subnormals.

  struct Shared {
    CombineBuffer<kDim, kTiles> combine;
  };

  float out[kTiles][kDim / 16][4];
  float max[kTiles][2];
  float sum[kTiles][2];

  // Lane g has bytes [4 kWords g, 4 kWords (g + 1)) of each 32 kWords bytes; two row tiles a word.
  static __device__ int OutDim(int m, int g, int r) {
    const int word = m / 2;
    return word / kWords * 32 * kWords + 4 * kWords * g + 4 * (word % kWords) + 2 * (m % 2) + r / 2;
  }

  static __device__ void Run(const Step& step, const HeadDescriptor& head, uint32_t unit,
                             uint32_t split, Shared* shared, float* partial, PartialMass* mass) {
    const uint32_t splits = step.splits.estimate;
    const uint32_t begin = head.chunk_count * split / splits;
    const uint32_t end = head.chunk_count * (split + 1) / splits;
    if (begin == end) {
      WriteEmptyPartial<kDim>(step.shape.group, partial, mass);
      return;
    }
    EstimateAttention zone;
    zone.Estimate(step, head, unit, begin, end);
    WritePartial(zone, step.shape.group, &shared->combine, partial, mass);
  }

 private:
  struct Clusters {
    uint32_t values[4][kLoads][kWords];
    float4 logits[kTiles];  // Of head 8 n + g.
    float4 scales;
  };

  __device__ void Estimate(const Step& step, const HeadDescriptor& head, uint32_t unit,
                           uint32_t begin, uint32_t end) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const uint32_t group = step.shape.group;
    const size_t stride = step.shape.cluster_capacity;
    const float* logits = step.workspace.logits + size_t{unit} * group * stride;
    float all[kTiles];          // log2 of the mass that head 8 n + g's weights are relative to,
    float summed[kTiles] = {};  // and their sum: this lane's clusters.
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint32_t h = 8 * n + g;
      all[n] = 0;
      if (h < group) {
        all[n] = fmaxf(step.workspace.cluster_mass[size_t{unit} * group + h], kLogFloor);
      }
      sum[n][0] = sum[n][1] = 0;
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
#pragma unroll
        for (int r = 0; r < 4; ++r) out[n][m][r] = 0;
      }
    }
    const float to_weight = head.value_scale_max > 0 ? kWeightScale / head.value_scale_max : 0;
    uint32_t segment = head.chunks[begin].segment;
    for (uint32_t chunk_idx = begin; chunk_idx < end; ++chunk_idx) {
      const ClusterChunk chunk = head.chunks[chunk_idx];
      if (chunk.segment != segment) {
        AddMeans(head.segments[segment].value_mean, to_weight, summed);
        segment = chunk.segment;
      }
#pragma unroll 2
      for (uint32_t i = 16 * warp; i < chunk.cluster_count; i += 16 * kStepWarps) {
        const Clusters clusters =
            Load(head, logits, stride, group, chunk.first_cluster + i + 4 * t, g);
        Add(clusters, all, to_weight, summed);
      }
    }
    AddMeans(head.segments[segment].value_mean, to_weight, summed);
    const float from_weight = head.value_scale_max > 0 ? head.value_scale_max / kWeightScale : 1;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
#pragma unroll
        for (int r = 0; r < 4; ++r) out[n][m][r] *= from_weight;
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) max[n][c] = __shfl_sync(kFullWarp, all[n], 4 * (2 * t + c));
    }
  }

  // Clusters first to first + 3 of one head.
  static __device__ Clusters Load(const HeadDescriptor& head, const float* logits, size_t stride,
                                  uint32_t group, uint32_t first, int g) {
    Clusters clusters;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int8_t* row = head.value_means + static_cast<size_t>(first + i) * kDim;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int8_t* at = row + 32 * kWords * j + 4 * kWords * g;
        if constexpr (kWords == 4) {
          const uint4 x = LoadOnce(at);
          clusters.values[i][j][0] = x.x;
          clusters.values[i][j][1] = x.y;
          clusters.values[i][j][2] = x.z;
          clusters.values[i][j][3] = x.w;
        } else {
          const uint2 x = __ldg(reinterpret_cast<const uint2*>(at));
          clusters.values[i][j][0] = x.x;
          clusters.values[i][j][1] = x.y;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      clusters.logits[n] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      const uint32_t h = 8 * n + g;
      if (h < group) {
        clusters.logits[n] = __ldcg(reinterpret_cast<const float4*>(logits + h * stride + first));
      }
    }
    clusters.scales = __ldg(reinterpret_cast<const float4*>(head.value_scales + first));
    return clusters;
  }

  __device__ void Add(const Clusters& clusters, const float (&all)[kTiles], float to_weight,
                      float (&summed)[kTiles]) {
    uint32_t weights[kTiles][2];
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 &logit = clusters.logits[n], &scale = clusters.scales;
      const float w0 = Exp2(logit.x - all[n]), w1 = Exp2(logit.y - all[n]);
      const float w2 = Exp2(logit.z - all[n]), w3 = Exp2(logit.w - all[n]);
      summed[n] += (w0 + w1) + (w2 + w3);
      weights[n][0] = PackPair<__half>(w0 * (scale.x * to_weight), w1 * (scale.y * to_weight));
      weights[n][1] = PackPair<__half>(w2 * (scale.z * to_weight), w3 * (scale.w * to_weight));
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32_t low[4], high[4];
        PairBytesAsHalf(clusters.values[0][j][w], clusters.values[1][j][w], low);
        PairBytesAsHalf(clusters.values[2][j][w], clusters.values[3][j][w], high);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int m = 2 * (j * kWords + w);
          Mma<__half>({low[0], low[1], high[0], high[1]}, weights[n][0], weights[n][1], out[n][m]);
          Mma<__half>({low[2], low[3], high[2], high[3]}, weights[n][0], weights[n][1],
                      out[n][m + 1]);
        }
      }
    }
  }

  // Adds the segment's mean value times the weight of its clusters, and begins a new sum.
  __device__ void AddMeans(const float* mean, float to_weight, float (&summed)[kTiles]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const float factor = to_weight > 0 ? to_weight : 1;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      // Lanes 4g .. 4g + 3 hold parts of head 8 n + g's sum.
      float whole = summed[n] + __shfl_xor_sync(kFullWarp, summed[n], 1);
      whole += __shfl_xor_sync(kFullWarp, whole, 2);
      summed[n] = 0;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float weight = __shfl_sync(kFullWarp, whole, 4 * (2 * t + c));
        sum[n][c] += weight;
#pragma unroll
        for (int m = 0; m < kDim / 16; ++m) {
          out[n][m][c] += mean[OutDim(m, g, c)] * (weight * factor);
          out[n][m][2 + c] += mean[OutDim(m, g, 2 + c)] * (weight * factor);
        }
      }
    }
  }
};

template <typename T, int kDim, int kTiles>
__global__ void __launch_bounds__(kStepThreads)
    AttendKernel(const __grid_constant__ Step step, uint32_t first_unit) {
  __shared__ union {
    typename BlockAttention<T, kDim, kTiles>::Shared blocks;
    typename EstimateAttention<T, kDim, kTiles>::Shared estimate;
    MergeBuffer merge;
  } shared;
  __shared__ bool is_last;
  const StepSplits& splits = step.splits;
  const uint32_t unit = first_unit + blockIdx.x, group = step.shape.group;
  const HeadDescriptor& head = step.workspace.heads[unit];
  UnitCounts* counts = step.workspace.counts + unit;
  const uint32_t partials = splits.steady + splits.misses + splits.hits + splits.estimate;
  float* partial_out = step.workspace.partial_out + size_t{unit} * partials * group * kDim;
  PartialMass* partial_mass = step.workspace.partial_mass + size_t{unit} * partials * group;
  const uint32_t partial = splits.steady + blockIdx.y;
  float* out = partial_out + partial * group * kDim;
  PartialMass* mass = partial_mass + partial * group;

  const uint32_t capacity = kClusterBlocksMax * step.shape.retrieve_capacity;
  const BlockRef* blocks = step.workspace.blocks + size_t{unit} * capacity;
  uint32_t split = blockIdx.y;
  if (split < splits.misses) {
    BlockAttention<T, kDim, kTiles>::Run(step, head, unit, blocks + capacity - 1, -1,
                                         counts->misses, split, splits.misses, &shared.blocks, out,
                                         mass);
  } else if (split -= splits.misses; split < splits.hits) {
    BlockAttention<T, kDim, kTiles>::Run(step, head, unit, blocks, 1, counts->hits, split,
                                         splits.hits, &shared.blocks, out, mass);
  } else {
    EstimateAttention<T, kDim, kTiles>::Run(step, head, unit, split - splits.hits, &shared.estimate,
                                            out, mass);
  }

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&counts->arrivals, 1) == gridDim.y - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  MergePartials<T, kDim>(partial_out, partial_mass, partials, group, &shared.merge,
                         static_cast<T*>(step.inputs.out) + size_t{unit} * group * kDim,
                         step.inputs.lse + size_t{unit} * group);
  __syncthreads();
  if (threadIdx.x == 0) {
    counts->arrivals = 0;
    if (head.state != nullptr) {
      __threadfence_system();
      ++head.state->completed_epoch;
    }
  }
}

}  // namespace wavekv::gpu
