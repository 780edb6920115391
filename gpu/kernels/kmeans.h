// Segmented spherical k-means on the device: keys of many segments at once, each within itself.
//
// The method is the CPU build's (index/cluster/partition.h): keys centred by their segment's mean,
// evenly spaced initial centroids, nine iterations. Sums are taken in order of the token, so
// the labels do not depend on timing.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "gpu/kernels/step_launch.h"
#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

inline constexpr uint32_t kSegmentTokensMax = 8192;
inline constexpr uint32_t kCentroidsMax = 512;

// One head's segment, in device memory. Arrays are written but for `keys`.
struct KMeansTask {
  const void* keys;         // [token_count, head_dim] element, rows 16-byte aligned
  uint32_t key_stride;      // Elements from a row to the next, a multiple of 8.
  uint32_t token_count;     // 1 to kSegmentTokensMax
  uint32_t centroid_count;  // 1 to kCentroidsMax, at most token_count
  float* mean;              // [head_dim] of the keys
  void* centroids;          // [kCentroidsMax, head_dim] element, unit length, of the centred keys
  float* offsets;           // [kCentroidsMax] mean . centroid
  uint16_t* labels;         // [token_count] below centroid_count
};

struct KMeansShape {
  uint32_t task_count = 0;       // At most 65,535.
  uint32_t token_count_max = 0;  // Of any task.
  uint32_t head_dim = 0;         // 64, 128 or 256.
  Element element = Element::kBF16;
  uint32_t iterations = 9;
};

// Clusters all tasks (`tasks` [task_count] in device memory) in `stream`. InvalidArgument for a
// shape that no kernel does; Unavailable, with CUDA's text, when a launch fails.
absl::Status LaunchKMeans(const KMeansTask* tasks, const KMeansShape& shape, GpuStream stream);

}  // namespace wavekv::gpu
