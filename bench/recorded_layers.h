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
  // Rows of one head as floats.
  std::vector<float> Keys(uint32_t kv_head) const;
  std::vector<float> Values(uint32_t kv_head) const;
};

// Layers (none named: all) of a trace that `wavekv record` wrote. What cannot be read ends the
// process with a message.
std::vector<RecordedLayer> ReadLayers(const std::string& path, std::span<const uint32_t> layers);

}  // namespace wavekv::bench
