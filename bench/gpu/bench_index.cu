#include <cuda_bf16.h>

#include <algorithm>

#include "bench/gpu/bench_index.h"
#include "gpu/kernels/kmeans.cuh"
#include "gpu/kernels/kmeans.h"
#include "gpu/kernels/mma.cuh"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

using gpu::kBlockRows;
using gpu::kCentroidsMax;
using gpu::kClusterPad;
using gpu::kSegmentTokensMax;
using Row = gpu::LaneDims<__nv_bfloat16, kBenchDim>;

constexpr uint32_t kTokensPerCluster = 16;
constexpr uint32_t kClusterTokens = gpu::kClusterBlocksMax * kBlockRows;
// Clusters of a segment after large ones are split.
constexpr uint32_t kPiecesMax = kCentroidsMax + kSegmentTokensMax / kClusterTokens;
constexpr int kThreads = 256;

struct Task {
  const __nv_bfloat16* keys;  // [token_count, dim]
  const __nv_bfloat16* values;
  uint32_t token_count;
  uint32_t unit;
  uint32_t segment;
  uint32_t first_row;      // Of the unit.
  uint32_t first_cluster;  // Of the unit; set between Order and Summarise.
  uint32_t first_block;
};

// What Order finds of a task.
struct Ordered {
  uint32_t cluster_count;
  uint32_t block_count;
  uint16_t sizes[kPiecesMax];
  uint16_t order[kSegmentTokensMax];  // Token of each row.
};

// Clusters of a segment, split to kClusterTokens, empty ones left out; rows in order of cluster,
// then of token.
__global__ void __launch_bounds__(kThreads)
    OrderKernel(const gpu::KMeansTask* kmeans, const Task* tasks, Ordered* ordered) {
  __shared__ uint32_t counts[kCentroidsMax], places[kCentroidsMax];
  __shared__ uint16_t members[kSegmentTokensMax];
  const uint16_t* labels = kmeans[blockIdx.x].labels;
  const Task task = tasks[blockIdx.x];
  Ordered* result = ordered + blockIdx.x;
  for (uint32_t i = threadIdx.x; i < kCentroidsMax; i += kThreads) counts[i] = 0;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < task.token_count; i += kThreads) {
    atomicAdd(&counts[labels[i]], 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t row = 0, clusters = 0, blocks = 0;
    for (uint32_t c = 0; c < kCentroidsMax; ++c) {
      places[c] = row;
      row += counts[c];
      const uint32_t pieces = (counts[c] + kClusterTokens - 1) / kClusterTokens;
      for (uint32_t p = 0; p < pieces; ++p) {
        const uint32_t size = counts[c] * (p + 1) / pieces - counts[c] * p / pieces;
        result->sizes[clusters++] = static_cast<uint16_t>(size);
        blocks += (size + kBlockRows - 1) / kBlockRows;
      }
    }
    result->cluster_count = clusters;
    result->block_count = blocks;
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < task.token_count; i += kThreads) {
    members[atomicAdd(&places[labels[i]], 1)] = static_cast<uint16_t>(i);
  }
  __syncthreads();
  const uint32_t lane = threadIdx.x % 32;
  for (uint32_t c = threadIdx.x / 32; c < kCentroidsMax; c += kThreads / 32) {
    const uint32_t n = counts[c], begin = places[c] - n;
    for (uint32_t i = lane; i < n; i += 32) {
      const uint16_t token = members[begin + i];
      uint32_t rank = 0;
      for (uint32_t k = 0; k < n; ++k) rank += members[begin + k] < token;
      result->order[begin + rank] = token;
    }
  }
}

// Rounds row - mean to bytes; returns their scale.
__device__ float Quantise(const Row& row, const float* mean, int8_t* bytes, Row* stored) {
  const int first = threadIdx.x % 32 * Row::kCount;
  float largest = 0;
  for (int i = 0; i < Row::kCount; ++i) {
    largest = fmaxf(largest, fabsf(row.x[i] - mean[first + i]));
  }
  const float scale = gpu::WarpMax(largest) / 127, inverse = scale > 0 ? 1 / scale : 0;
  for (int i = 0; i < Row::kCount; ++i) {
    const float whole = rintf((row.x[i] - mean[first + i]) * inverse);
    bytes[first + i] = static_cast<int8_t>(whole);
    stored->x[i] = mean[first + i] + scale * whole;
  }
  return scale;
}

// Means of a task's keys and values. One CTA a task.
__global__ void __launch_bounds__(kThreads)
    MeansKernel(const Task* tasks, LayerShape shape, LayerArrays layer) {
  const Task task = tasks[blockIdx.x];
  float* means = layer.means + (size_t{task.unit} * shape.segments + task.segment) * 3 * kBenchDim;
  const uint32_t half = threadIdx.x / kBenchDim, d = threadIdx.x % kBenchDim;
  const __nv_bfloat16* rows = half == 0 ? task.keys : task.values;
  float sum = 0;
#pragma unroll 8
  for (uint32_t i = 0; i < task.token_count; ++i) {
    sum += __bfloat162float(rows[size_t{i} * kBenchDim + d]);
  }
  means[half * kBenchDim + d] = sum / task.token_count;
  if (half == 0) means[2 * kBenchDim + d] = 0;
}

// Summaries and rows of the clusters of a task; a warp a cluster. grid (x, tasks).
__global__ void __launch_bounds__(kThreads)
    SummariseKernel(const Task* tasks, const Ordered* ordered, LayerShape shape, LayerArrays layer,
                    __nv_bfloat16* pool_keys, __nv_bfloat16* pool_values) {
  __shared__ uint32_t first_rows[kPiecesMax + 1], first_blocks[kPiecesMax + 1];
  __shared__ float spread[kBenchDim];
  const Task task = tasks[blockIdx.y];
  const Ordered* result = ordered + blockIdx.y;
  if (threadIdx.x == 0) {
    uint32_t row = 0, block = 0;
    for (uint32_t c = 0; c < result->cluster_count; ++c) {
      first_rows[c] = row;
      first_blocks[c] = block;
      row += result->sizes[c];
      block += (result->sizes[c] + kBlockRows - 1) / kBlockRows;
    }
  }
  if (threadIdx.x < kBenchDim) spread[threadIdx.x] = 0;
  __syncthreads();
  float* means = layer.means + (size_t{task.unit} * shape.segments + task.segment) * 3 * kBenchDim;
  const uint32_t lane = threadIdx.x % 32, warps = gridDim.x * kThreads / 32;
  const size_t rows_before =
      size_t{task.unit} * (shape.tokens - kBenchSinks - kBenchWindow) + task.first_row;
  for (uint32_t c = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; c < result->cluster_count;
       c += warps) {
    const uint32_t size = result->sizes[c];
    Row key_sum = {}, value_sum = {};
    for (uint32_t i = 0; i < size; ++i) {
      const uint32_t row = first_rows[c] + i, token = result->order[row];
      const __nv_bfloat16* key_row = task.keys + size_t{token} * kBenchDim;
      const __nv_bfloat16* value_row = task.values + size_t{token} * kBenchDim;
      const Row key = Row::Load(key_row), value = Row::Load(value_row);
      for (int d = 0; d < Row::kCount; ++d) {
        key_sum.x[d] += key.x[d] / size;
        value_sum.x[d] += value.x[d] / size;
      }
      const size_t target = (rows_before + row) * kBenchDim;
      reinterpret_cast<uint2*>(pool_keys + target)[lane] =
          reinterpret_cast<const uint2*>(key_row)[lane];
      reinterpret_cast<uint2*>(pool_values + target)[lane] =
          reinterpret_cast<const uint2*>(value_row)[lane];
    }
    const size_t at = size_t{task.unit} * shape.clusters + task.first_cluster + c;
    Row key_stored, value_stored;
    const float key_scale = Quantise(key_sum, means, layer.centroids + at * kBenchDim, &key_stored);
    const float value_scale =
        Quantise(value_sum, means + kBenchDim, layer.value_means + at * kBenchDim, &value_stored);
    float key_spread = 0, value_spread = 0;
    Row per_dim = {};
    for (uint32_t i = 0; i < size; ++i) {
      const uint32_t token = result->order[first_rows[c] + i];
      const Row key = Row::Load(task.keys + size_t{token} * kBenchDim);
      const Row value = Row::Load(task.values + size_t{token} * kBenchDim);
      for (int d = 0; d < Row::kCount; ++d) {
        const float off = key.x[d] - key_stored.x[d], value_off = value.x[d] - value_stored.x[d];
        per_dim.x[d] += off * off;
        key_spread += off * off;
        value_spread += value_off * value_off;
      }
    }
    key_spread = gpu::WarpSum(key_spread) / size;
    value_spread = sqrtf(gpu::WarpSum(value_spread) / size / size);
    for (int d = 0; d < Row::kCount; ++d) {
      atomicAdd(&spread[lane * Row::kCount + d], per_dim.x[d]);
    }
    if (lane == 0) {
      layer.centroid_scales[at] = key_scale;
      layer.value_scales[at] = value_scale;
      layer.key_spreads[at] = key_spread;
      layer.value_spreads[at] = value_spread;
      layer.sizes[at] = static_cast<uint16_t>(size);
      layer.cluster_segment[at] = static_cast<uint16_t>(task.segment);
      layer.first_row[at] = first_rows[c];
      layer.first_block[at] = task.first_block + first_blocks[c];
    }
    // All blocks are cached, each in the slot of its number.
    for (uint32_t i = 0; i < size; ++i) {
      const size_t block =
          size_t{task.unit} * shape.blocks + task.first_block + first_blocks[c] + i / kBlockRows;
      uint16_t* slot = layer.slots + (block * 2 * kBlockRows + i % kBlockRows) * kBenchDim;
      const uint32_t token = result->order[first_rows[c] + i];
      reinterpret_cast<uint2*>(slot)[lane] =
          reinterpret_cast<const uint2*>(task.keys + size_t{token} * kBenchDim)[lane];
      reinterpret_cast<uint2*>(slot + kBlockRows * kBenchDim)[lane] =
          reinterpret_cast<const uint2*>(task.values + size_t{token} * kBenchDim)[lane];
    }
  }
  __syncthreads();
  if (threadIdx.x < kBenchDim) atomicAdd(&means[2 * kBenchDim + threadIdx.x], spread[threadIdx.x]);
}

// Spread sums become shares. One CTA of kBenchDim threads a segment.
__global__ void SharesKernel(float* means) {
  __shared__ float total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  float* share = means + size_t{blockIdx.x} * 3 * kBenchDim + 2 * kBenchDim + threadIdx.x;
  atomicAdd(&total, *share);
  __syncthreads();
  *share = total > 0 ? *share / total : 0;
}

// The rows that are not clustered.
__global__ void SteadyKernel(LayerShape shape, LayerArrays layer, const uint2* keys,
                             const uint2* values) {
  const uint32_t unit = blockIdx.x, words = kBenchDim / 4;
  for (uint32_t i = threadIdx.x; i < (kBenchSinks + kBenchWindow) * words; i += blockDim.x) {
    const uint32_t row = i / words, word = i % words;
    const bool sink = row < kBenchSinks;
    const uint32_t token = sink ? row : shape.tokens - kBenchWindow + (row - kBenchSinks);
    const size_t from = (size_t{unit} * shape.tokens + token) * words + word;
    uint2* zone = reinterpret_cast<uint2*>(sink ? layer.sinks : layer.ring);
    const uint32_t capacity = sink ? kBenchSinks : kBenchRing;
    const size_t to = (size_t{unit} * 2 * capacity + token % capacity) * words + word;
    zone[to] = keys[from];
    zone[to + size_t{capacity} * words] = values[from];
  }
}

// The tasks of all units, in order of unit and segment.
std::vector<Task> MakeTasks(uint32_t units, uint32_t tokens, const void* keys, const void* values,
                            uint32_t* segments) {
  std::vector<Task> tasks;
  const uint32_t clustered = tokens - kBenchSinks - kBenchWindow;
  *segments = (clustered + kSegmentTokensMax - 1) / kSegmentTokensMax;
  for (uint32_t unit = 0; unit < units; ++unit) {
    for (uint32_t s = 0; s < *segments; ++s) {
      const uint32_t first = s * kSegmentTokensMax;
      const size_t row = size_t{unit} * tokens + kBenchSinks + first;
      tasks.push_back({static_cast<const __nv_bfloat16*>(keys) + row * kBenchDim,
                       static_cast<const __nv_bfloat16*>(values) + row * kBenchDim,
                       std::min(kSegmentTokensMax, clustered - first), unit, s, first, 0, 0});
    }
  }
  return tasks;
}

// Places of the tasks' clusters and blocks; fills what depends on them in `built`.
void PlaceClusters(const std::vector<uint32_t>& counts, const std::vector<uint32_t>& blocks,
                   std::vector<Task>* tasks, BuiltLayer* built) {
  built->cluster_counts.assign(built->shape.units, 0);
  built->block_counts.assign(built->shape.units, 0);
  built->real_clusters.assign(built->shape.units, 0);
  for (size_t i = 0; i < tasks->size(); ++i) {
    Task& task = (*tasks)[i];
    uint32_t& clusters = built->cluster_counts[task.unit];
    task.first_cluster = clusters;
    task.first_block = built->block_counts[task.unit];
    clusters += (counts[i] + kClusterPad - 1) / kClusterPad * kClusterPad;
    built->block_counts[task.unit] += blocks[i];
    built->real_clusters[task.unit] += counts[i];
  }
  for (uint32_t unit = 0; unit < built->shape.units; ++unit) {
    built->shape.clusters = std::max(built->shape.clusters, built->cluster_counts[unit]);
    built->shape.blocks = std::max(built->shape.blocks, built->block_counts[unit]);
  }
}

}  // namespace

absl::StatusOr<BuiltLayer> BuildLayer(uint32_t units, uint32_t tokens,
                                      const RetrieveCount& retrieve, const void* keys,
                                      const void* values, void* pool) {
  BuiltLayer built;
  LayerShape& shape = built.shape;
  shape.units = units;
  shape.tokens = tokens;
  std::vector<Task> tasks = MakeTasks(units, tokens, keys, values, &shape.segments);
  const size_t count = tasks.size();

  WAVEKV_ASSIGN_OR_RETURN(auto labels, gpu::DeviceArray<uint16_t>::Make(count * kSegmentTokensMax));
  WAVEKV_ASSIGN_OR_RETURN(auto centroids,
                          gpu::DeviceArray<uint16_t>::Make(count * kCentroidsMax * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(auto offsets, gpu::DeviceArray<float>::Make(count * kCentroidsMax));
  WAVEKV_ASSIGN_OR_RETURN(auto means, gpu::DeviceArray<float>::Make(count * kBenchDim));
  std::vector<gpu::KMeansTask> kmeans;
  for (size_t i = 0; i < count; ++i) {
    kmeans.push_back({tasks[i].keys, kBenchDim, tasks[i].token_count,
                      std::max(1u, tasks[i].token_count / kTokensPerCluster),
                      means.data() + i * kBenchDim,
                      centroids.data() + i * kCentroidsMax * kBenchDim,
                      offsets.data() + i * kCentroidsMax, labels.data() + i * kSegmentTokensMax});
  }
  WAVEKV_ASSIGN_OR_RETURN(auto device_kmeans, gpu::DeviceArray<gpu::KMeansTask>::Copy(kmeans));
  WAVEKV_RETURN_IF_ERROR(gpu::LaunchKMeans(device_kmeans.data(),
                                           {.task_count = static_cast<uint32_t>(count),
                                            .token_count_max = kSegmentTokensMax,
                                            .head_dim = kBenchDim},
                                           nullptr));
  WAVEKV_ASSIGN_OR_RETURN(auto device_tasks, gpu::DeviceArray<Task>::Copy(tasks));
  WAVEKV_ASSIGN_OR_RETURN(auto ordered, gpu::DeviceArray<Ordered>::Make(count));
  OrderKernel<<<count, kThreads>>>(device_kmeans.data(), device_tasks.data(), ordered.data());
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  struct Counts {
    uint32_t clusters, blocks;
  };
  std::vector<Counts> found(count);
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpy2D(found.data(), sizeof(Counts), ordered.data(),
                                           sizeof(Ordered), sizeof(Counts), count,
                                           cudaMemcpyDeviceToHost));
  std::vector<uint32_t> clusters, blocks;
  for (const Counts& c : found) {
    clusters.push_back(c.clusters);
    blocks.push_back(c.blocks);
  }
  PlaceClusters(clusters, blocks, &tasks, &built);
  for (const uint32_t real : built.real_clusters) {
    shape.retrieve = std::max(shape.retrieve, retrieve(real));
  }
  WAVEKV_RETURN_IF_ERROR(device_tasks.Upload(tasks));
  WAVEKV_ASSIGN_OR_RETURN(built.memory, gpu::DeviceArray<char>::Make(LayerBytes(shape)));
  const LayerArrays layer = LayOutLayer(shape, built.memory.data());
  const size_t pool_bytes = PoolBytes(units, tokens);
  WAVEKV_ASSIGN_OR_RETURN(auto sorted, gpu::DeviceArray<char>::Make(pool_bytes));
  auto* sorted_keys = reinterpret_cast<__nv_bfloat16*>(sorted.data());
  __nv_bfloat16* sorted_values = sorted_keys + pool_bytes / 4;
  MeansKernel<<<count, kThreads>>>(device_tasks.data(), shape, layer);
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  SummariseKernel<<<dim3(4, count), kThreads>>>(device_tasks.data(), ordered.data(), shape, layer,
                                                sorted_keys, sorted_values);
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  SharesKernel<<<units * shape.segments, kBenchDim>>>(layer.means);
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  SteadyKernel<<<units, kThreads>>>(shape, layer, static_cast<const uint2*>(keys),
                                    static_cast<const uint2*>(values));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpy(pool, sorted.data(), pool_bytes, cudaMemcpyDeviceToHost));
  std::vector<float> scales(size_t{units} * shape.clusters);
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpy(scales.data(), layer.value_scales,
                                         scales.size() * sizeof(float), cudaMemcpyDeviceToHost));
  built.value_scale_max = *std::max_element(scales.begin(), scales.end());
  return built;
}

}  // namespace wavekv::bench
