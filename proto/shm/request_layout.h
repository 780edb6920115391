// The structs of docs/formats.md, "Requests". Only requests.cc reads and writes them.
#pragma once

#include <cstdint>

namespace wavekv::shm {

struct WireTensor {
  uint8_t dtype = 0;   // 0: no tensor. 1 f32, 2 f16, 3 bf16.
  uint8_t layout = 0;  // 1 NHD, 2 HND.
  uint8_t rank = 0;
  uint8_t zero[5] = {};
  int64_t shape[4] = {};
  uint64_t offset = 0;  // From the start of the request.
  uint64_t bytes = 0;
  uint64_t zero_end = 0;
};
static_assert(sizeof(WireTensor) == 64);

struct WireBudget {
  uint32_t kind = 0;  // 0: the sequence's own.
  uint32_t clusters_max = 0;
  uint32_t sketch_clusters = 0;
  uint32_t zero = 0;
  double value = 0;
  double estimate_ratio = 0;
};
static_assert(sizeof(WireBudget) == 32);

inline constexpr uint32_t kFlagExact = 1;   // Attend.
inline constexpr uint32_t kFlagInline = 2;  // Query.

// Query and Estimate as a whole; the first half of an Attend's item.
struct WireLayerQuery {
  uint64_t sequence_id = 0;
  uint64_t generation = 0;
  uint32_t layer = 0;
  uint32_t flags = 0;
  uint64_t argument = 0;  // Query: completed_step. Attend: append_position.
  WireBudget budget;
  WireTensor queries;
};
static_assert(sizeof(WireLayerQuery) == 128);

struct WireAttendItem {
  WireLayerQuery query;
  WireTensor append_keys;
  WireTensor append_values;
};
static_assert(sizeof(WireAttendItem) == 256);

// Then the items.
struct WireAttend {
  uint32_t item_count = 0;
  uint32_t zero[15] = {};
};
static_assert(sizeof(WireAttend) == 64);

// Then layer_count numbers of layers, 4 bytes each.
struct WireInsert {
  uint64_t sequence_id = 0;
  uint64_t generation = 0;
  uint64_t first_position = 0;
  uint32_t layer_count = 0;
  uint32_t zero = 0;
  WireTensor keys;
  WireTensor values;
};
static_assert(sizeof(WireInsert) == 160);

}  // namespace wavekv::shm
