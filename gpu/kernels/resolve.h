// Launching the kernel that turns the offsets of resident regions into what the steps of one token
// follow (docs/decisions/015-resident-region.md).
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "gpu/kernels/resolve_head.h"
#include "gpu/kernels/step_launch.h"

namespace wavekv::gpu {

inline constexpr uint32_t kSegmentsMax = 65536;  // Of a head: a cluster names its own in 16 bits.

// What the host sees of an entry's unit: the entry's tag above, the code in the lowest byte.
inline constexpr uint32_t kResolveTagMax = (1u << 24) - 1;
WAVEKV_HOST_DEVICE inline uint32_t PackOutcome(uint32_t tag, ResolveCode code) {
  return tag << 8 | static_cast<uint32_t>(code);
}

// unit = (layer * batch + entry) * kv_heads + kv_head. All pointers but `outcomes` are device
// memory of the engine's own.
struct Resolve {
  ResolveShape shape;
  uint32_t batch = 0;
  const ResolveEntry* entries = nullptr;  // [batch]
  HeadDescriptor* heads = nullptr;        // [units]
  SegmentCopy* segments = nullptr;        // [units, shape.segment_capacity]
  uint32_t* reported = nullptr;  // [units] what `outcomes` holds; zero before the first launch
  uint32_t* outcomes = nullptr;  // [units] host memory that the device writes, likewise zero
};

inline uint32_t UnitCount(const Resolve& resolve) {
  return resolve.shape.layer_count * resolve.batch * resolve.shape.kv_heads;
}

// Begins a token: resolves every unit. It may be captured. A unit whose outcome is not kOk gets a
// head of nothing. Unavailable, with CUDA's text, when the launch fails.
absl::Status LaunchResolve(const Resolve& resolve, GpuStream stream);

// Replaces entries[index] in the order of the stream. Errors as above.
absl::Status LaunchSetEntry(ResolveEntry* entries, uint32_t index, const ResolveEntry& entry,
                            GpuStream stream);

}  // namespace wavekv::gpu
