// Ratios of step counters, 0 when nothing was counted.
#pragma once

#include "client/types.h"

namespace wavekv::client {

// Bytes read over the bytes that exact attention would have read.
inline double KvBytesReadRatio(const StepCounters& counters) {
  if (counters.kv_bytes_full == 0) return 0;
  return static_cast<double>(counters.kv_bytes_read) / static_cast<double>(counters.kv_bytes_full);
}

// Blocks found in the block cache over blocks asked for.
inline double HitRatio(const StepCounters& counters) {
  const uint64_t blocks = counters.cache_hit_blocks + counters.cache_miss_blocks;
  if (blocks == 0) return 0;
  return static_cast<double>(counters.cache_hit_blocks) / static_cast<double>(blocks);
}

}  // namespace wavekv::client
