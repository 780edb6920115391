// The structs of docs/formats.md, "Replies". All offsets count from the start of the reply.
#pragma once

#include <cstdint>

namespace wavekv::shm {

struct WireCounters {
  uint64_t steady_tokens = 0;
  uint64_t retrieved_clusters = 0;
  uint64_t retrieved_tokens = 0;
  uint64_t estimated_clusters = 0;
  uint64_t sketched_clusters = 0;
  uint64_t ignored_clusters = 0;
  uint64_t moved_to_estimation = 0;
  uint64_t kv_bytes_read = 0;
  uint64_t kv_bytes_full = 0;
  uint64_t cache_hit_blocks = 0;
  uint64_t cache_miss_blocks = 0;
  uint64_t error_budget_met = 0;
  uint64_t error_budget_capped = 0;
};
static_assert(sizeof(WireCounters) == 104);

// A run of bytes of the reply.
struct WireRun {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

struct WireInsertReply {
  uint64_t generation = 0;
  uint64_t token_count = 0;
};
static_assert(sizeof(WireInsertReply) == 16);

// Then result_count results.
struct WireAttendReply {
  uint32_t result_count = 0;
  uint32_t zero[15] = {};
};
static_assert(sizeof(WireAttendReply) == 64);

struct WireAttendResult {
  uint64_t code = 0;  // A status code; the fields below hold when it is 0.
  uint64_t generation = 0;
  uint64_t version = 0;
  uint64_t token_count = 0;
  WireRun out;   // [query_heads, value_dim] f32
  WireRun lse;   // [query_heads] f32
  WireRun text;  // Of the error.
  WireCounters counters;
  uint64_t zero = 0;
};
static_assert(sizeof(WireAttendResult) == 192);

struct WireEstimateReply {
  uint64_t generation = 0;
  uint64_t version = 0;
  WireRun out;  // [query_heads, value_dim] f32
  WireRun lse;  // [query_heads] f32, as the next two.
  WireRun lse_lower;
  WireRun lse_upper;
  WireCounters counters;
};
static_assert(sizeof(WireEstimateReply) == 184);

// Then head_count WireHeadZones.
struct WireQueryReply {
  uint64_t generation = 0;
  uint64_t version = 0;
  uint64_t token_count = 0;
  uint64_t step = 0;
  uint64_t head_count = 0;
  WireCounters counters;
  WireEstimateReply estimation;
};
static_assert(sizeof(WireQueryReply) == 328);

struct WireCluster {
  uint32_t segment_idx = 0;
  uint32_t cluster_idx = 0;
  uint32_t size = 0;
  uint32_t first_block = 0;
  float estimated_mass = 0;
};
static_assert(sizeof(WireCluster) == 20);

struct WireStagedRows {
  uint64_t key_offset = 0;  // Into the wave buffer.
  uint64_t value_offset = 0;
  uint32_t row_count = 0;
  uint32_t cache_hit = 0;
};
static_assert(sizeof(WireStagedRows) == 24);

struct WireHeadZones {
  uint64_t kv_head = 0;
  uint64_t steady_tokens = 0;
  WireRun retrieved;         // WireCluster
  WireRun staged;            // WireStagedRows
  WireRun inline_keys;       // [rows, key_dim]; no bytes unless asked for.
  WireRun inline_values;     // [rows, value_dim]
  WireRun inline_positions;  // [rows] 8 bytes each
  uint64_t zero[4] = {};
};
static_assert(sizeof(WireHeadZones) == 128);

}  // namespace wavekv::shm
