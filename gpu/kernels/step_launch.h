// Launching a decode step: attention of one layer over the wave buffer, in the caller's stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "gpu/kernels/step_layout.h"

struct CUstream_st;
struct CUevent_st;

namespace wavekv::gpu {

using GpuStream = CUstream_st*;  // cudaStream_t
using GpuEvent = CUevent_st*;    // cudaEvent_t

// InvalidArgument naming the field, what was found and what is allowed.
absl::Status ValidateShape(const StepShape& shape);

// Splits that fill a device of `sm_count` multiprocessors.
StepSplits PlanSplits(const StepShape& shape, uint32_t sm_count);

// Bytes of device memory that a workspace needs; its arrays lie one after another from `base`
// (256-byte aligned) on.
size_t WorkspaceBytes(const StepShape& shape, const StepSplits& splits);
StepWorkspace LayOutWorkspace(const StepShape& shape, const StepSplits& splits, void* base);

// Partial results of a unit: what the merge reads.
inline uint32_t PartialCount(const StepSplits& splits) {
  return splits.steady + splits.misses + splits.hits + splits.estimate;
}

// Consecutive units of a step.
struct UnitRange {
  uint32_t first = 0;
  uint32_t count = 0;
};

// The stages of a step, each for the units of `units`, in this order. They may be captured.
//   Begin: latches the descriptors and appends the new token.
//   Rank: logits of all clusters; attention over the steady zone.
//   Select: chooses the clusters to retrieve, finds their blocks in the cache or the pool.
//   Attend: exact attention over the retrieved blocks, fills free slots with what was missed,
//     estimates all other clusters, merges all into `out` and `lse`, completes the epoch.
// Unavailable, with CUDA's text, when a launch fails. `step` is copied.
absl::Status LaunchBegin(const Step& step, UnitRange units, GpuStream stream);
absl::Status LaunchRank(const Step& step, UnitRange units, GpuStream stream);
absl::Status LaunchSelect(const Step& step, UnitRange units, GpuStream stream);
absl::Status LaunchAttend(const Step& step, UnitRange units, GpuStream stream);

// A second stream on which misses of the first units fly while the next are ranked.
struct StepPipeline {
  GpuStream side = nullptr;     // Null: one stage after another.
  GpuEvent selected = nullptr;  // Both made without timing.
  GpuEvent attended = nullptr;
  uint32_t first_units = 0;  // Units ranked and selected ahead of all others; 0: none.
};

// All stages. The side stream is forked from `stream` and joined to it again.
absl::Status LaunchStep(const Step& step, const StepPipeline& pipeline, GpuStream stream);

}  // namespace wavekv::gpu
