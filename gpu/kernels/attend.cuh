// Attention over the retrieved blocks and the estimated clusters of a unit, and the merge of all.
//
// A CTA is one split of one part of one unit: all units' misses first, because what they wait for
// (the bus) takes longest; then hits; then the estimation zone. Rows pass through a ring of stages
// in shared memory, one for each warp. The last CTA of a unit to finish merges its partial results.
// grid (units, splits).
#pragma once

#include "gpu/kernels/partials.cuh"
#include "gpu/kernels/row_attention.cuh"
#include "gpu/kernels/segments.cuh"
#include "gpu/kernels/warp_ring.cuh"

namespace wavekv::gpu {

// Exact attention over every splits-th pair of blocks of a list.
template <typename T, int kDim, int kTiles>
struct BlockAttention {
  static constexpr int kDepth = 2;

  struct Stage {
    RowStage<kDim> rows;
    RowStretch stretches[2];
  };

  // Blocks, walked in steps of `direction` (1 or -1) from the first.
  struct List {
    const BlockRef* first;
    int direction;
    uint32_t count;
  };

  // Split `split` of `splits` of them, each of a CTA's first `warps` warps every so many pairs;
  // nothing beyond. kHost: they lie in the pool.
  template <bool kHost>
  static __device__ void Run(const Step& step, const HeadDescriptor& head, uint32_t unit,
                             const List& list, uint32_t split, uint32_t splits, uint32_t warps,
                             QueryFragments<kDim, kTiles>* queries, Stage* ring,
                             CombineBuffer<kDim, kTiles>* combine, float* out, PartialMass* mass) {
    const uint32_t group = step.shape.group, warp_idx = threadIdx.x / 32;
    if (split >= splits || 2 * split * warps >= list.count) {
      WriteEmptyPartial<kDim>(group, out, mass);
      return;
    }
    LoadQueryFragments(static_cast<const T*>(step.inputs.queries) + size_t{unit} * group * kDim,
                       group, queries);
    __syncthreads();
    WarpAttention<T, kDim, kTiles> warp;
    warp.Clear();
    if (warp_idx < warps) {
      Attend<kHost>(head, list, 2 * (split * warps + warp_idx), 2 * warps * splits,
                    step.shape.scale * kLog2E, *queries, ring + warp_idx * kDepth, &warp);
    }
    warp.Finish();
    __syncthreads();  // The rings' memory is used again.
    WritePartial(warp, group, combine, out, mass);
  }

 private:
  template <bool kHost>
  static __device__ void Attend(const HeadDescriptor& head, const List& list, uint32_t first,
                                uint32_t stride, float scale,
                                const QueryFragments<kDim, kTiles>& queries, Stage* ring,
                                WarpAttention<T, kDim, kTiles>* warp) {
    const bool leads = threadIdx.x % 32 == 0;
    uint32_t asked = first;
    BlockRef refs[2];
    ReadPair(list, asked, refs);
    int place = 0;  // Of the next stage to ask for.
    const auto request = [&] {
      Stage& stage = ring[place];
      place = (place + 1) % kDepth;
      if (asked >= list.count) {
        CloseCopies();
        return;
      }
      const RowStretch stretches[2] = {Stretch(head, refs[0]), Stretch(head, refs[1])};
      asked += stride;
      ReadPair(list, asked, refs);
      if (leads) {
        stage.stretches[0] = stretches[0];
        stage.stretches[1] = stretches[1];
      }
      if constexpr (kHost) stage.rows.Fetch(stretches);
      if constexpr (!kHost) stage.rows.Request(stretches);
    };
#pragma unroll
    for (int i = 0; i < kDepth - 1; ++i) request();
    int used = 0;
    for (uint32_t i = first; i < list.count; i += stride) {
      request();
      const Stage& stage = ring[used];
      AwaitCopies<kDepth - 1>();
      const RowStretch stretches[2] = {stage.stretches[0], stage.stretches[1]};
      warp->AddStage(stretches, stage.rows, queries, scale, kHost);
      __syncwarp();
      used = (used + 1) % kDepth;
    }
  }

  static __device__ void ReadPair(const List& list, uint32_t i, BlockRef (&refs)[2]) {
#pragma unroll
    for (uint32_t s = 0; s < 2; ++s) {
      refs[s] = {nullptr, nullptr, 0, -1};
      if (i + s < list.count) refs[s] = list.first[list.direction * static_cast<int64_t>(i + s)];
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
  static constexpr int kDepth = kDim > 128 ? 4 : 6;

  // A head's, read once: what the descriptor says lies in memory.
  struct Arrays {
    const int8_t* value_means;
    const float* value_scales;
    const uint16_t* cluster_segment;
    const float* logits;  // [heads, stride]
    size_t stride;
  };

  // A tile of kClusterPad clusters. Chunks of value means are permuted as the rows of RowStage.
  struct Stage {
    static constexpr int kChunks = kDim / 16;  // 16-byte chunks of a row.
    uint4 values[kClusterPad][kChunks];
    uint4 logits[8 * kTiles][kClusterPad / 4];
    uint4 scales[kClusterPad / 4];
    uint4 segments[kClusterPad / 8];

    static __device__ int Place(int row, int chunk) {
      return chunk ^ (row / 4 * (kChunks > 4 ? 2 : 1));
    }

    // A warp asks for the tile at cluster `first`.
    __device__ void Request(const Arrays& arrays, uint32_t group, uint32_t first) {
      const int lane = threadIdx.x % 32;
      const int8_t* from = arrays.value_means + static_cast<size_t>(first) * kDim;
#pragma unroll
      for (int i = 0; i < kChunks / 2; ++i) {
        const int piece = 32 * i + lane, row = piece / kChunks, chunk = piece % kChunks;
        CopyAhead(&values[row][Place(row, chunk)], from + 16 * piece);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int h = 8 * n + lane / 4, part = lane % 4;
        if (h < group) {
          CopyAhead(&logits[h][part], arrays.logits + h * arrays.stride + first + 4 * part);
        }
      }
      if (lane < 4) {
        CopyAhead(&scales[lane], arrays.value_scales + first + 4 * lane);
      } else if (lane < 6) {
        CopyAhead(&segments[lane - 4], arrays.cluster_segment + first + 8 * (lane - 4));
      }
      CloseCopies();
    }
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
                             uint32_t split, uint32_t splits, Stage* ring,
                             CombineBuffer<kDim, kTiles>* combine, float* partial,
                             PartialMass* mass) {
    const uint32_t tiles = head.cluster_count / kClusterPad;
    const uint32_t begin = tiles * split / splits, end = tiles * (split + 1) / splits;
    if (split >= splits || begin == end) {
      WriteEmptyPartial<kDim>(step.shape.group, partial, mass);
      return;
    }
    EstimateAttention zone;
    zone.Estimate(step, head, unit, begin, end, ring + threadIdx.x / 32 * kDepth);
    __syncthreads();  // The rings' memory is used again.
    WritePartial(zone, step.shape.group, combine, partial, mass);
  }

 private:
  struct Clusters {
    uint32_t values[4][kLoads][kWords];
    float4 logits[kTiles];  // Of head 8 n + g.
    float4 scales;
  };

  // This warp's tiles of [begin, end).
  __device__ void Estimate(const Step& step, const HeadDescriptor& head, uint32_t unit,
                           uint32_t begin, uint32_t end, Stage* ring) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t group = step.shape.group, first = begin + threadIdx.x / 32;
    const size_t stride = step.shape.cluster_capacity;
    const Arrays arrays = {head.value_means, head.value_scales, head.cluster_segment,
                           step.workspace.logits + size_t{unit} * group * stride, stride};
    uint32_t asked = first;
    int place = 0;
    const auto request = [&] {
      if (asked < end) {
        ring[place].Request(arrays, group, asked * kClusterPad);
      } else {
        CloseCopies();
      }
      asked += kStepWarps;
      place = (place + 1) % kDepth;
    };
#pragma unroll
    for (int i = 0; i < kDepth - 1; ++i) request();
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
    uint32_t segment = head.cluster_segment[min(first, end - 1) * kClusterPad];
    int used = 0;
    for (uint32_t tile = first; tile < end; tile += kStepWarps) {
      request();
      AwaitCopies<kDepth - 1>();
      const Stage& stage = ring[used];
      used = (used + 1) % kDepth;
      const uint32_t its_segment = reinterpret_cast<const uint16_t*>(stage.segments)[0];
      if (its_segment != segment) {
        AddMeans(SegmentOf(head, segment).value_mean, to_weight, summed);
        segment = its_segment;
      }
      Add(Read(stage, group), all, to_weight, summed);
      __syncwarp();
    }
    AddMeans(SegmentOf(head, segment).value_mean, to_weight, summed);
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

  // Clusters 4t to 4t + 3 of a tile, their bytes that lane g has.
  static __device__ Clusters Read(const Stage& stage, uint32_t group) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Clusters clusters;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 4 * t + i;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        if constexpr (kWords == 4) {
          const uint4 x = stage.values[row][Stage::Place(row, 8 * j + g)];
          clusters.values[i][j][0] = x.x;
          clusters.values[i][j][1] = x.y;
          clusters.values[i][j][2] = x.z;
          clusters.values[i][j][3] = x.w;
        } else {
          const uint2 x =
              reinterpret_cast<const uint2*>(&stage.values[row][Stage::Place(row, g / 2)])[g % 2];
          clusters.values[i][j][0] = x.x;
          clusters.values[i][j][1] = x.y;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      clusters.logits[n] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      const uint32_t h = 8 * n + g;
      if (h < group) clusters.logits[n] = reinterpret_cast<const float4&>(stage.logits[h][t]);
    }
    clusters.scales = reinterpret_cast<const float4&>(stage.scales[t]);
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

// What the CTAs of AttendKernel have in dynamic shared memory, one after the other.
template <typename T, int kDim, int kTiles>
union AttendShared {
  typename BlockAttention<T, kDim, kTiles>::Stage
      blocks[kStepWarps * BlockAttention<T, kDim, kTiles>::kDepth];
  typename EstimateAttention<T, kDim, kTiles>::Stage
      clusters[kStepWarps * EstimateAttention<T, kDim, kTiles>::kDepth];
  CombineBuffer<kDim, kTiles> combine;
  MergeBuffer merge;
};

template <typename T, int kDim, int kTiles>
__global__ void __launch_bounds__(kStepThreads, kTiles == 1 && kDim <= 128 ? 3 : 1)
    AttendKernel(const __grid_constant__ Step step) {
  using Blocks = BlockAttention<T, kDim, kTiles>;
  extern __shared__ uint4 dynamic[];
  auto& shared = *reinterpret_cast<AttendShared<T, kDim, kTiles>*>(dynamic);
  __shared__ QueryFragments<kDim, kTiles> queries;
  __shared__ bool is_last;
  const StepSplits& splits = step.splits;
  const uint32_t unit = blockIdx.x, group = step.shape.group;
  const HeadDescriptor& head = step.workspace.heads[unit];
  UnitCounts* counts = step.workspace.counts + unit;
  const uint32_t partials = splits.steady + splits.misses + splits.hits + splits.estimate;
  float* partial_out = step.workspace.partial_out + size_t{unit} * partials * group * kDim;
  PartialMass* partial_mass = step.workspace.partial_mass + size_t{unit} * partials * group;
  uint32_t split = blockIdx.y;
  const uint32_t partial = splits.steady + split;
  float* out = partial_out + partial * group * kDim;
  PartialMass* mass = partial_mass + partial * group;

  const uint32_t capacity = kClusterBlocksMax * step.shape.retrieve_capacity;
  const BlockRef* blocks = step.workspace.blocks + size_t{unit} * capacity;
  const uint32_t hits = counts->hits, misses = counts->misses;
  // While many misses cross the bus there is time for the rest, and fewer that read the device's
  // memory at once leave the bus its full speed: 2 to 3 % of a step at a tenth missed.
  const bool in_the_shadow = misses > hits / 32;
  const uint32_t hit_splits = in_the_shadow ? (splits.hits + 2) / 3 : splits.hits;
  const uint32_t zone_splits = in_the_shadow ? (2 * splits.estimate + 2) / 3 : splits.estimate;
  if (split < splits.misses) {
    Blocks::template Run<true>(step, head, unit, {blocks + capacity - 1, -1, misses}, split,
                               splits.misses, splits.miss_warps, &queries, shared.blocks,
                               &shared.combine, out, mass);
  } else if (split -= splits.misses; split < splits.hits) {
    Blocks::template Run<false>(step, head, unit, {blocks, 1, hits}, split, hit_splits, kStepWarps,
                                &queries, shared.blocks, &shared.combine, out, mass);
  } else {
    EstimateAttention<T, kDim, kTiles>::Run(step, head, unit, split - splits.hits, zone_splits,
                                            shared.clusters, &shared.combine, out, mass);
  }

  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&counts->arrivals, 1) == gridDim.y - 1;
  }
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
      head.state->appended_settled = head.state->appended;
      head.state->log_settled = head.state->log_end;
      __threadfence_system();
      ++head.state->completed_epoch;
    }
  }
}

}  // namespace wavekv::gpu
