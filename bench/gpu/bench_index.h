// Builds the wave index of one layer on the device, for the benchmarks: k-means, clusters in order,
// summaries in the format of the device copy, all blocks in a cache.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/kernels/device_array.h"
#include "gpu/kernels/step_launch.h"

namespace wavekv::bench {

inline constexpr uint32_t kBenchDim = 128;
inline constexpr uint32_t kBenchSinks = 4;
inline constexpr uint32_t kBenchWindow = 64;
inline constexpr uint32_t kBenchRing = 2240;  // Rows of the steady ring.

// Capacities of a layer's arrays, alike for every unit.
struct LayerShape {
  uint32_t units = 0;
  uint32_t tokens = 0;  // Of a unit; the first kBenchSinks and last kBenchWindow are not clustered.
  uint32_t segments = 0;
  uint32_t clusters = 0;
  uint32_t blocks = 0;
  uint32_t retrieve = 0;

  constexpr uint32_t clustered() const { return tokens - kBenchSinks - kBenchWindow; }
};

// The arrays of a layer for all units, one after another from an address on. Copying the memory and
// laying it out at the copy gives another layer, once its descriptors are made again.
struct LayerArrays {
  int8_t* centroids;       // [units, clusters, dim]
  int8_t* value_means;     // [units, clusters, dim]
  float* centroid_scales;  // [units, clusters] and so on
  float* value_scales;
  float* key_spreads;
  float* value_spreads;
  uint16_t* sizes;
  uint16_t* cluster_segment;
  uint32_t* first_row;
  uint32_t* first_block;
  gpu::SegmentCopy* segments;  // [units, segments]
  float* means;                // [units, segments, 3, dim] of keys, of values, spread shares
  int32_t* block_slots;        // [units, blocks]
  gpu::FreeSlot* free_slots;   // [units, blocks]
  gpu::HeadState* state;       // [units]
  gpu::HeadDescriptor* heads;  // [units]
  uint16_t* sinks;             // [units, 2, kBenchSinks, dim]
  uint16_t* ring;              // [units, 2, kBenchRing, dim]
  gpu::BlockUse* log;          // [units, 2 * blocks]
  uint16_t* slots;             // [units, blocks, 2, kBlockRows, dim]; slot = block
};
size_t LayerBytes(const LayerShape& shape);
LayerArrays LayOutLayer(const LayerShape& shape, void* base);

// A layer built from rows [units, tokens, dim] bf16 (device). `pool` (host memory that the device
// reads, PoolBytes(shape) of it) gets the clustered rows in order of cluster: keys [units,
// clustered, dim], then values likewise.
struct BuiltLayer {
  LayerShape shape;
  gpu::DeviceArray<char> memory;
  std::vector<uint32_t> cluster_counts;  // [units], padding counted
  std::vector<uint32_t> block_counts;    // [units]
  std::vector<uint32_t> real_clusters;   // [units]
  float value_scale_max = 0;
};
size_t PoolBytes(uint32_t units, uint32_t tokens);
// Of so many clusters of a head, how many a step retrieves.
using RetrieveCount = std::function<uint32_t(uint32_t clusters)>;
absl::StatusOr<BuiltLayer> BuildLayer(uint32_t units, uint32_t tokens,
                                      const RetrieveCount& retrieve, const void* keys,
                                      const void* values, void* pool);

// Writes descriptors and states of a layer whose arrays lie at `base` and whose payload lies in
// `pool`.
absl::Status DescribeLayer(const BuiltLayer& built, void* base, const void* pool);

// Makes a share of the blocks, by a hash of `seed`, such as the next step misses: their slots are
// on offer, and they are out of the table but for those of the newest offers, which the step takes
// out.
absl::Status ForceMisses(const BuiltLayer& built, void* base, double hit_ratio, uint64_t seed);

}  // namespace wavekv::bench
