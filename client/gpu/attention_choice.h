// Where exact attention in the device's own memory is faster than a step of the resident path: a
// model of what both cost, for an engine that has room for either. Pure functions.
//
// Both are bytes over a rate, and fixed costs. Full attention reads every key and value once. A
// step of the resident path ranks all clusters, reads all their value sums and the rows of those
// that it retrieves; the missed rows come over the bus while the rest is read. The constants are
// those of the rows in bench/results/h200/gpu-attend.json, of which the model is within a tenth for
// most, and 22 % too low for the worst: docs/performance.md. The group does not matter: its query
// heads share what is read.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace wavekv::client {

// A layer's step of a batch.
struct AttentionProblem {
  uint32_t batch = 1;
  uint64_t tokens = 0;  // Of each sequence.
  uint32_t kv_head_count = 0;
  uint32_t head_dim = 0;
  uint32_t element_bytes = 2;
  // Blocks asked for that the block cache has. 0.91 was seen with a cache of 5 %, 0.94 with 20 %.
  double hit_ratio = 0.9;
};

// What a device does, as kernels see it. Defaults: an NVIDIA H200, PCIe 5 x16.
struct DeviceRates {
  double hbm_bytes_per_s = 4.57e12;  // Of full attention over long contexts.
  double bus_bytes_per_s = 50.2e9;   // Of kernels that read host memory in pieces of 2 KB.
};

struct AttentionCost {
  double full_us = 0;  // Exact attention over all keys and values in device memory.
  double wave_us = 0;  // The resident path, keys and values in host memory, the default budget.
  bool full_wins() const { return full_us < wave_us; }
};

// InvalidArgument for a count of 0, a hit ratio outside 0 to 1, or a rate that is not positive.
absl::StatusOr<AttentionCost> EstimateAttention(const AttentionProblem& problem,
                                                const DeviceRates& rates = {});

// The most tokens, `tokens_max` or a multiple of 1,024 below it, such that full attention wins
// there and at each multiple before; problem.tokens is not looked at. Errors as EstimateAttention,
// and InvalidArgument for more than 2^32 tokens.
absl::StatusOr<uint64_t> FullAttentionTokensMax(AttentionProblem problem, uint64_t tokens_max,
                                                const DeviceRates& rates = {});

}  // namespace wavekv::client
