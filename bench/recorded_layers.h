// Keys, values and queries of a real model, layer by layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "storage/base/dtype.h"

namespace wavekv::bench {

// One step's queries of a layer, and how many of the layer's tokens they attend over.
struct RecordedQuery {
  uint32_t token_count = 0;
  std::vector<float> queries;  // [query_heads, key_dim]
};

struct RecordedLayer {
  uint32_t layer = 0;
  uint32_t token_count = 0;
  uint32_t query_heads = 0;
  uint32_t kv_heads = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  DType dtype = DType::kF16;
  float scale = 0;
  // For each KV head [token_count, key_dim] and [token_count, value_dim], of dtype.
  std::vector<std::vector<std::byte>> keys, values;
  std::vector<RecordedQuery> queries;  // Ascending by token_count.

  uint32_t group_size() const { return query_heads / kv_heads; }
};

// Layers (none named: all) of a trace that `wavekv record` wrote, or of a directory of arrays that
// numpy saved: k_l<layer>.npy and v_l<layer>.npy [tokens, KV heads, dim] in float16, q_l<layer>.npy
// [steps, query heads, dim] in float32, and positions.npy [steps] in float32, the position of each
// step's token; scale 1 / sqrt(dim). What cannot be read ends the process with a message.
std::vector<RecordedLayer> ReadLayers(const std::string& path, std::span<const uint32_t> layers);

}  // namespace wavekv::bench
