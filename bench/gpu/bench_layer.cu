// Where a layer's arrays lie, what its descriptors say, and which of its blocks are cached.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "bench/gpu/bench_index.h"
#include "gpu/kernels/kmeans.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

using gpu::kBlockRows;
using gpu::kSegmentTokensMax;

// Offers that a forced step has not seen: about as many as a step takes at nine hits of ten.
constexpr uint32_t kNewOffers = 64;

__global__ void ForceKernel(LayerShape shape, LayerArrays layer, const uint32_t* block_counts,
                            uint32_t threshold, uint64_t seed) {
  const uint32_t unit = blockIdx.x;
  __shared__ uint32_t free_count;
  if (threadIdx.x == 0) free_count = 0;
  __syncthreads();
  for (uint32_t b = threadIdx.x; b < block_counts[unit]; b += blockDim.x) {
    uint64_t x = seed + (uint64_t{unit} << 32) + b;
    x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 29)) * 0x94d049bb133111ebu;
    const bool hit = static_cast<uint32_t>(x >> 32) <= threshold;
    layer.block_slots[size_t{unit} * shape.blocks + b] = hit ? static_cast<int32_t>(b) : -1;
    if (!hit) layer.free_slots[size_t{unit} * shape.blocks + atomicAdd(&free_count, 1)] = {b, b};
  }
  __syncthreads();
  // What the newest offers name is in the table until a step sees them.
  const uint32_t seen = free_count - min(free_count, kNewOffers);
  for (uint32_t i = seen + threadIdx.x; i < free_count; i += blockDim.x) {
    const gpu::FreeSlot offer = layer.free_slots[size_t{unit} * shape.blocks + i];
    layer.block_slots[size_t{unit} * shape.blocks + offer.block] = static_cast<int32_t>(offer.slot);
  }
  if (threadIdx.x == 0) {
    layer.state[unit].free_head = 0;
    layer.state[unit].free_seen = seen;
    layer.state[unit].free_tail = free_count;
  }
}

template <typename Visit>
void VisitLayer(const LayerShape& shape, LayerArrays* arrays, Visit visit) {
  const size_t units = shape.units, clusters = units * shape.clusters;
  const size_t blocks = units * shape.blocks;
  visit(&arrays->centroids, clusters * kBenchDim);
  visit(&arrays->value_means, clusters * kBenchDim);
  visit(&arrays->centroid_scales, clusters);
  visit(&arrays->value_scales, clusters);
  visit(&arrays->key_spreads, clusters);
  visit(&arrays->value_spreads, clusters);
  visit(&arrays->sizes, clusters);
  visit(&arrays->cluster_segment, clusters);
  visit(&arrays->first_row, clusters);
  visit(&arrays->first_block, clusters);
  visit(&arrays->segments, units * shape.segments);
  visit(&arrays->means, units * shape.segments * 3 * kBenchDim);
  visit(&arrays->block_slots, blocks);
  visit(&arrays->free_slots, blocks);
  visit(&arrays->state, units);
  visit(&arrays->heads, units);
  visit(&arrays->sinks, units * 2 * kBenchSinks * kBenchDim);
  visit(&arrays->ring, units * 2 * kBenchRing * kBenchDim);
  visit(&arrays->log, 2 * blocks);
  visit(&arrays->slots, blocks * 2 * kBlockRows * kBenchDim);
}

constexpr size_t kAlignment = 256;

size_t Padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

size_t LayerBytes(const LayerShape& shape) {
  size_t bytes = 0;
  LayerArrays none;
  VisitLayer(shape, &none,
             [&](auto* array, size_t count) { bytes += Padded(count * sizeof(**array)); });
  return bytes;
}

LayerArrays LayOutLayer(const LayerShape& shape, void* base) {
  LayerArrays arrays;
  char* at = static_cast<char*>(base);
  VisitLayer(shape, &arrays, [&](auto* array, size_t count) {
    *array = reinterpret_cast<std::remove_reference_t<decltype(*array)>>(at);
    at += Padded(count * sizeof(**array));
  });
  return arrays;
}

size_t PoolBytes(uint32_t units, uint32_t tokens) {
  return size_t{units} * (tokens - kBenchSinks - kBenchWindow) * kBenchDim * 4;
}

absl::Status DescribeLayer(const BuiltLayer& built, void* base, const void* pool) {
  const LayerShape& shape = built.shape;
  const LayerArrays layer = LayOutLayer(shape, base);
  const auto* pool_keys = static_cast<const char*>(pool);
  const char* pool_values = pool_keys + PoolBytes(shape.units, shape.tokens) / 2;
  std::vector<gpu::SegmentCopy> segments;
  std::vector<gpu::HeadState> states(shape.units);
  std::vector<gpu::HeadDescriptor> heads;
  for (uint32_t unit = 0; unit < shape.units; ++unit) {
    for (uint32_t s = 0; s < shape.segments; ++s) {
      const size_t row = size_t{unit} * shape.clustered() + size_t{s} * kSegmentTokensMax;
      const uint32_t rows = std::min(kSegmentTokensMax, shape.clustered() - s * kSegmentTokensMax);
      const float* means = layer.means + (size_t{unit} * shape.segments + s) * 3 * kBenchDim;
      segments.push_back({pool_keys + row * kBenchDim * 2, pool_values + row * kBenchDim * 2, means,
                          means + kBenchDim, means + 2 * kBenchDim, rows});
    }
    states[unit].appended = shape.tokens;
    const size_t first = size_t{unit} * shape.clusters, first_block = size_t{unit} * shape.blocks;
    uint16_t* sinks = layer.sinks + size_t{unit} * 2 * kBenchSinks * kBenchDim;
    uint16_t* ring = layer.ring + size_t{unit} * 2 * kBenchRing * kBenchDim;
    gpu::HeadDescriptor head = {};
    head.sink_keys = sinks;
    head.sink_values = sinks + kBenchSinks * kBenchDim;
    head.steady_keys = ring;
    head.steady_values = ring + kBenchRing * kBenchDim;
    head.centroids = layer.centroids + first * kBenchDim;
    head.value_means = layer.value_means + first * kBenchDim;
    head.centroid_scales = layer.centroid_scales + first;
    head.value_scales = layer.value_scales + first;
    head.key_spreads = layer.key_spreads + first;
    head.value_spreads = layer.value_spreads + first;
    head.sizes = layer.sizes + first;
    head.cluster_segment = layer.cluster_segment + first;
    head.first_row = layer.first_row + first;
    head.first_block = layer.first_block + first;
    head.segments = layer.segments + size_t{unit} * shape.segments;
    head.block_slots = layer.block_slots + first_block;
    head.slots = layer.slots + first_block * 2 * kBlockRows * kBenchDim;
    head.free_slots = layer.free_slots + first_block;
    head.log = layer.log + 2 * first_block;
    head.state = layer.state + unit;
    head.steady_first = shape.tokens - kBenchWindow;
    head.steady_capacity = kBenchRing;
    head.sink_count = kBenchSinks;
    head.cluster_count = built.cluster_counts[unit];
    head.segment_count = shape.segments;
    head.block_count = built.block_counts[unit];
    head.slot_count = shape.blocks;
    head.free_capacity = shape.blocks;
    head.log_capacity = 2 * shape.blocks;
    head.retrieve_count = std::min(shape.retrieve, built.real_clusters[unit]);
    head.value_scale_max = built.value_scale_max;
    heads.push_back(head);
  }
  const auto upload = [](auto* to, const auto& from) {
    return gpu::CudaStatus(
        cudaMemcpy(to, from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice),
        "cudaMemcpy");
  };
  WAVEKV_RETURN_IF_ERROR(upload(layer.segments, segments));
  WAVEKV_RETURN_IF_ERROR(upload(layer.state, states));
  return upload(layer.heads, heads);
}

absl::Status ForceMisses(const BuiltLayer& built, void* base, double hit_ratio, uint64_t seed) {
  WAVEKV_ASSIGN_OR_RETURN(auto counts, gpu::DeviceArray<uint32_t>::Copy(built.block_counts));
  const auto threshold = static_cast<uint32_t>(std::min(hit_ratio * 0x1p32, 0x1p32 - 1));
  ForceKernel<<<built.shape.units, 1024>>>(built.shape, LayOutLayer(built.shape, base),
                                           counts.data(), threshold, seed);
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
  return absl::OkStatus();
}

}  // namespace wavekv::bench
