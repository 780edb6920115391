// Ranking: logits and ranks of every cluster for the whole group, on tensor cores, and attention
// over the steady zone, whose mass the ranks are relative to.
#pragma once

#include <cstddef>

#include "gpu/kernels/partials.cuh"
#include "gpu/kernels/row_attention.cuh"
#include "gpu/kernels/segments.cuh"
#include "gpu/kernels/warp_ring.cuh"

namespace wavekv::gpu {

// What a cluster's tokens scatter about its centroid and its mean value.
struct ClusterScatter {
  float log2_size;      // -inf: no tokens.
  float log_size;       // Natural.
  float reached;        // sqrt(2 log size): how many deviations the tokens hold of a normal tail.
  float deviation;      // Of the keys; times SegmentView::reach that of the logits.
  float value_squared;  // Square of the spread of the mean value.

  __device__ ClusterScatter(uint16_t size, float key_spread, float value_spread) {
    log2_size = size == 0 ? -INFINITY : __log2f(static_cast<float>(size));
    log_size = size == 0 ? 0 : kLn2 * log2_size;
    reached = SquareRoot(2 * log_size);
    deviation = SquareRoot(fmaxf(key_spread, 0));
    value_squared = value_spread * value_spread;
  }

  // The deviation of the logits, finite and far beyond what makes a difference.
  __device__ float LogitDeviation(float reach) const {
    constexpr float kDeviationMax = 1e15f;
    return fminf(reach * deviation, kDeviationMax);
  }

  // log2 of how much more mass the tokens have than `size` at the centroid, for logits of deviation
  // `s`: half of what normal ones would have (docs/decisions/009-index-arrays.md).
  __device__ float LogGain(float s) const {
    const float normal = s <= reached ? 0.5f * s * s : s * reached - log_size;
    return (0.5f * kLog2E) * fminf(normal, s);
  }

  // log2 of what estimating the cluster is expected to do to the output, but for its share of the
  // mass: as Kernels::rank_clusters of the CPU (docs/decisions/006-ranking.md).
  __device__ float LogMisjudged(float s) const {
    constexpr float kLargest = 8, kSixth = 1.0f / 6;  // v up to 64.
    s = fminf(s, kLargest);
    const float v = s * s;
    const float tail = 0.375f * v - 0.5f * fminf(0.5f * v, s);
    const float grown = v * (1 + v * (0.5f + v * kSixth));  // exp(v) - 1, to third order
    const float squared = value_squared * __fdividef(grown, 1 + grown);
    return kLog2E * tail + fmaxf(0.5f * __log2f(squared), kLogFloor);  // Also of nothing: nothing.
  }
};

// Ranks a stretch of tiles of kClusterPad clusters for up to kHeads (4, 8 or 16) query heads; each
// warp every kStepWarps-th.
//
// The result of a product has eight columns. For more than four heads a column is a head, and the
// high and the low bytes of the queries take a product each. Four heads take one: columns 0 to 3
// are high bytes, 4 to 7 low ones, and two lanes that have both of two heads share their clusters.
template <typename T, int kDim, int kHeads>
struct ClusterRanker {
  static constexpr int kLoads = kDim / 64;  // 16-byte loads of a centroid, per lane.
  static constexpr int kDepth = 4;
  static constexpr bool kOneProduct = kHeads == 4;
  static constexpr int kProducts = kOneProduct ? 1 : 2;  // Of a tile of heads.
  static constexpr int kTiles = kOneProduct ? 1 : kHeads / 8;
  static constexpr int kRows = kOneProduct ? 1 : 2;       // Of a tile's clusters, this lane's.
  static constexpr int kHeadLanes = kOneProduct ? 2 : 4;  // Neighbours with different heads.

  // A tile in shared memory. Chunk i of row r lies at i ^ 4 (r % 2), where a row has so many.
  struct Stage {
    static constexpr int kChunks = kDim / 16;
    uint4 rows[kClusterPad][kChunks];
    float scales[kClusterPad];
    float key_spreads[kClusterPad];
    float value_spreads[kClusterPad];
    uint16_t sizes[kClusterPad];
    uint16_t segments[kClusterPad];

    static __device__ int Place(int row, int chunk) {
      return kChunks > 4 ? chunk ^ (row % 2 * 4) : chunk;
    }
  };

  // What a lane copies of each tile: pieces of its rows, and at most one of its other arrays.
  struct Copier {
    const int8_t* rows;
    const char* other = nullptr;  // Of tile 0.
    uint32_t other_bytes = 0;     // From tile to tile.
    uint32_t other_place = 0;     // In the stage.

    __device__ explicit Copier(const HeadDescriptor& head) : rows(head.centroids) {
      const uint32_t lane = threadIdx.x % 32, piece = lane % 4 * 16;
      const auto take = [&](const void* array, uint32_t bytes, size_t place, uint32_t from) {
        other = static_cast<const char*>(array) + from;
        other_bytes = bytes;
        other_place = place + from;
      };
      switch (lane / 4) {
        case 0:
          take(head.centroid_scales, 64, offsetof(Stage, scales), piece);
          break;
        case 1:
          take(head.key_spreads, 64, offsetof(Stage, key_spreads), piece);
          break;
        case 2:
          take(head.value_spreads, 64, offsetof(Stage, value_spreads), piece);
          break;
        case 3:
          if (lane % 4 < 2) {
            take(head.sizes, 32, offsetof(Stage, sizes), piece);
          } else {
            take(head.cluster_segment, 32, offsetof(Stage, segments), piece - 32);
          }
          break;
        default:
          break;
      }
    }

    __device__ void Request(uint32_t tile, Stage* stage) const {
      const int lane = threadIdx.x % 32;
      const int8_t* from = rows + size_t{tile} * (kClusterPad * kDim);
#pragma unroll
      for (int i = 0; i < Stage::kChunks / 2; ++i) {
        const int at = 32 * i + lane, row = at / Stage::kChunks, chunk = at % Stage::kChunks;
        CopyAhead(&stage->rows[row][Stage::Place(row, chunk)], from + 16 * at);
      }
      if (other != nullptr) {
        CopyAhead(reinterpret_cast<char*>(stage) + other_place, other + size_t{tile} * other_bytes);
      }
      CloseCopies();
    }
  };

  struct Shared {
    Stage ring[kStepWarps][kDepth];
    float max[kStepWarps][kHeads];
    float sum[kStepWarps][kHeads];
  };

  // This lane's share of the work on a tile.
  static __device__ int Row(int r) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    return g + 8 * (kOneProduct ? t / 2 : r);
  }
  static __device__ uint32_t Head(int n, int c) {
    return 8 * n + 2 * (threadIdx.x % kHeadLanes) + c;
  }

  // The queries as the second operand: lane (g, t) holds bytes 64 j + 16 t of column g.
  struct Queries {
    uint4 bytes[kProducts][kLoads];
    float scale[2];       // Of heads Head(n, {0, 1}).
    SegmentView view[2];  // Likewise, of the segment at hand.
  };

  Queries queries[kTiles];
  float max[kTiles][2], sum[kTiles][2];

  __device__ void LoadQueries(const Step& step, uint32_t unit) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int8_t* bytes = step.workspace.query_bytes + size_t{unit} * 2 * kGroupMax * kDim + 16 * t;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        const int low = kOneProduct ? g / 4 : p, head = kOneProduct ? g % 4 : 8 * n + g;
#pragma unroll
        for (int j = 0; j < kLoads; ++j) {
          queries[n].bytes[p][j] =
              *reinterpret_cast<const uint4*>(bytes + (low * kGroupMax + head) * kDim + 64 * j);
        }
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        queries[n].scale[c] = step.workspace.query_scales[unit * kGroupMax + Head(n, c)];
        queries[n].view[c] = {};
      }
    }
  }

  // What the heads see of a segment; views [group].
  __device__ void LookAt(const SegmentView* views, uint32_t group) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (Head(n, c) < group) queries[n].view[c] = views[Head(n, c)];
      }
    }
  }

  // Dot products of this lane's clusters with its heads' integers.
  __device__ void Multiply(const Stage& stage, int n, int (&dots)[kRows][2]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int sums[kProducts][4] = {};
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint4 top = stage.rows[g][Stage::Place(g, 4 * j + t)];
      const uint4 bottom = stage.rows[g + 8][Stage::Place(g + 8, 4 * j + t)];
#pragma unroll
      for (int p = 0; p < kProducts; ++p) {
        const uint4& q = queries[n].bytes[p][j];
        MmaS8({top.x, bottom.x, top.y, bottom.y}, q.x, q.y, sums[p]);
        MmaS8({top.z, bottom.z, top.w, bottom.w}, q.z, q.w, sums[p]);
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if constexpr (kOneProduct) {
        // Lanes t and t + 2 have the high and the low bytes' sums: the first finishes cluster g,
        // the second cluster g + 8.
        const bool low = t >= 2;
        const int first = sums[0][c], second = sums[0][2 + c];
        const int kept = low ? second : first, given = low ? first : second;
        const int taken = __shfl_xor_sync(kFullWarp, given, 2);
        dots[0][c] = low ? 128 * taken + kept : 128 * kept + taken;
      } else {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          dots[r][c] = 128 * sums[0][2 * r + c] + sums[1][2 * r + c];
        }
      }
    }
  }

  // log2 of the estimated mass of this lane's clusters for its heads of tile n, and of their rank
  // but for the mass of all.
  __device__ void Score(const Stage& stage, int n, float scale, bool by_mass,
                        float (&masses)[kRows][2], float (&ranks)[kRows][2]) const {
    int dots[kRows][2];
    Multiply(stage, n, dots);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = Row(r);
      const ClusterScatter cluster(stage.sizes[row], stage.key_spreads[row],
                                   stage.value_spreads[row]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const SegmentView& view = queries[n].view[c];
        const float dot = static_cast<float>(dots[r][c]) * queries[n].scale[c];
        const float s = cluster.LogitDeviation(view.reach);
        masses[r][c] = scale * (dot * stage.scales[row] + view.mean_dot) + cluster.log2_size +
                       cluster.LogGain(s);
        ranks[r][c] = masses[r][c] + (by_mass ? 0 : cluster.LogMisjudged(s));
      }
    }
  }

  // This warp's tiles of [begin, end); writes the stretch's mass [group].
  __device__ void Run(const Step& step, const HeadDescriptor& head, uint32_t unit, uint32_t begin,
                      uint32_t end, Shared* shared, PartialMass* mass) {
    const uint32_t group = step.shape.group, warp = threadIdx.x / 32;
    const size_t stride = step.shape.cluster_capacity;
    const size_t first = unit * group * stride + begin * kClusterPad;
    float* logits = step.workspace.logits + first;
    float* ranks = step.workspace.ranks + first;
    const uint32_t segments = KnownSegments(step.shape, head);
    const SegmentView* views =
        step.workspace.views + size_t{unit} * step.shape.segment_capacity * group;
    const float scale = step.shape.scale * kLog2E;
    Stage* ring = shared->ring[warp];
    const Copier copier(head);
    uint32_t asked = begin + warp;
    int place = 0;
    const auto request = [&] {
      asked < end ? copier.Request(asked, &ring[place]) : CloseCopies();
      asked += kStepWarps;
      place = (place + 1) % kDepth;
    };
#pragma unroll
    for (int i = 0; i < kDepth - 1; ++i) request();
    LoadQueries(step, unit);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      max[n][0] = max[n][1] = kLogFloor;
      sum[n][0] = sum[n][1] = 0;
    }
    uint32_t segment = ~0u;
    int used = 0;
    for (uint32_t tile = begin + warp; tile < end; tile += kStepWarps) {
      request();
      AwaitCopies<kDepth - 1>();
      const Stage& stage = ring[used];
      used = (used + 1) % kDepth;
      if (stage.segments[0] != segment) {
        segment = stage.segments[0];
        LookAt(views + size_t{KnownSegment(segment, segments)} * group, group);
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float masses[kRows][2], its_ranks[kRows][2];
        Score(stage, n, scale, step.shape.rank_by_mass, masses, its_ranks);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint32_t h = Head(n, c);
          if (h < group) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              const int row = Row(r);
              const uint32_t at =
                  h * step.shape.cluster_capacity + (tile - begin) * kClusterPad + row;
              logits[at] = masses[r][c];
              ranks[at] = its_ranks[r][c];
            }
          }
          float largest = max[n][c];
#pragma unroll
          for (int r = 0; r < kRows; ++r) largest = fmaxf(largest, masses[r][c]);
          sum[n][c] *= Exp2(max[n][c] - largest);
#pragma unroll
          for (int r = 0; r < kRows; ++r) sum[n][c] += Exp2(masses[r][c] - largest);
          max[n][c] = largest;
        }
      }
      __syncwarp();
    }
    WriteMass(group, shared, mass);
  }

  // Sums over the lanes and warps.
  __device__ void WriteMass(uint32_t group, Shared* shared, PartialMass* mass) const {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float largest = RowsMax(max[n][c]);
        if constexpr (kOneProduct) {
          largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
        }
        float total = RowsSum(sum[n][c] * Exp2(max[n][c] - largest));
        if constexpr (kOneProduct) total += __shfl_xor_sync(kFullWarp, total, 2);
        if (lane < kHeadLanes) {
          shared->max[warp][Head(n, c)] = largest;
          shared->sum[warp][Head(n, c)] = total;
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
    // The state lies where a client can write: never more rows than the ring has.
    const uint64_t ring_end = head.steady_first / kBlockRows * kBlockRows + head.steady_capacity;
    const uint64_t steady_end = head.state == nullptr ? 0 : min(head.state->appended, ring_end);
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

// Dynamic shared memory of RankKernel.
template <typename T, int kDim, int kHeads>
constexpr size_t RankSharedBytes() {
  using Ranker = ClusterRanker<T, kDim, kHeads>;
  constexpr size_t kRank = sizeof(typename Ranker::Shared);
  constexpr size_t kSteady = sizeof(typename SteadyAttention<T, kDim, Ranker::kTiles>::Shared);
  return kRank > kSteady ? kRank : kSteady;
}

// grid (steady splits + step.splits.rank, units)
template <typename T, int kDim, int kHeads>
__global__ void __launch_bounds__(kStepThreads) RankKernel(const __grid_constant__ Step step) {
  using Ranker = ClusterRanker<T, kDim, kHeads>;
  using Steady = SteadyAttention<T, kDim, Ranker::kTiles>;
  extern __shared__ uint4 dynamic[];
  const uint32_t unit = blockIdx.y;
  const HeadDescriptor& head = step.workspace.heads[unit];
  if (blockIdx.x < step.splits.steady) {
    Steady::Run(step, head, unit, blockIdx.x, reinterpret_cast<typename Steady::Shared*>(dynamic));
    return;
  }
  const uint32_t split = blockIdx.x - step.splits.steady;
  const uint32_t tiles = head.cluster_count / kClusterPad;
  Ranker ranker;
  ranker.Run(
      step, head, unit, tiles * split / step.splits.rank, tiles * (split + 1) / step.splits.rank,
      reinterpret_cast<typename Ranker::Shared*>(dynamic),
      step.workspace.rank_mass + (size_t{unit} * step.splits.rank + split) * step.shape.group);
}

}  // namespace wavekv::gpu
