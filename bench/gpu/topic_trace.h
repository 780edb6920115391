// The topic trace on the device: keys with the structure of a long text and queries that drift
// through it, one stream for each head.
//
// Per head and 8,192-token segment 256 topics, N(0, 1); a new one every 4 tokens; key = topic + 0.5
// N
// + the head's mean; values N(0, 1). A query is 3.5 (AR(1) state + 0.2 topic) / |1, 0.2|, the state
// decaying by 0.98 a step and 80 % of its variance shared by the group; the topic changes every 50
// steps on average. Numbers are a hash of their place: the same for any launch.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "gpu/kernels/step_launch.h"

namespace wavekv::bench {

struct TraceShape {
  uint64_t seed = 0;
  uint32_t units = 0;   // Sequences times KV heads.
  uint32_t tokens = 0;  // Of each.
  uint32_t group = 0;
  uint32_t head_dim = 0;  // Even.
};

// keys, values [units, tokens, head_dim] bf16, device memory.
absl::Status MakeTraceRows(const TraceShape& shape, void* keys, void* values,
                           gpu::GpuStream stream);

// Queries of step `step_idx`, to be called with 0, 1, 2 ... `state` [units, group + 1, head_dim]
// float32 and queries [units, group, head_dim] bf16, device memory; `stream_idx` tells apart
// independent streams of queries over the same rows.
absl::Status AdvanceTraceQueries(const TraceShape& shape, uint32_t stream_idx, uint32_t step_idx,
                                 float* state, void* queries, gpu::GpuStream stream);

}  // namespace wavekv::bench
