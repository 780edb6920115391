// Launching a decode step: attention of one layer over the wave buffer, in the caller's stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "gpu/kernels/step_layout.h"

struct CUstream_st;

namespace wavekv::gpu {

using GpuStream = CUstream_st*;  // cudaStream_t

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

// The kernels of a step, in this order. They may be captured.
//   Begin: latches the descriptors and appends the new token.
//   Rank: logits and ranks of all clusters; attention over the steady zone.
//   Select: chooses the clusters to retrieve, finds their blocks in the cache or the pool.
//   Attend: exact attention over the retrieved blocks, fills free slots with what was missed,
//     estimates all other clusters, merges all into `out` and `lse`, completes the epoch.
// Unavailable, with CUDA's text, when a launch fails. `step` is copied.
absl::Status LaunchBegin(const Step& step, GpuStream stream);
absl::Status LaunchRank(const Step& step, GpuStream stream);
absl::Status LaunchSelect(const Step& step, GpuStream stream);
absl::Status LaunchAttend(const Step& step, GpuStream stream);

// All of them.
absl::Status LaunchStep(const Step& step, GpuStream stream);

}  // namespace wavekv::gpu
