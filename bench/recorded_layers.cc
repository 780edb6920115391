#include "bench/recorded_layers.h"

#include <algorithm>
#include <cstring>

#include "storage/base/check.h"
#include "storage/base/model_shape.h"
#include "storage/trace/layer_trace.h"

namespace wavekv::bench {
namespace {

// Rows [tokens, heads, dim] as one run for each head.
std::vector<std::vector<std::byte>> SplitHeads(std::span<const std::byte> rows, size_t heads,
                                               size_t row_bytes) {
  const size_t tokens = rows.size() / (heads * row_bytes);
  std::vector<std::vector<std::byte>> split(heads, std::vector<std::byte>(tokens * row_bytes));
  for (size_t i = 0; i < tokens; ++i) {
    for (size_t h = 0; h < heads; ++h) {
      std::memcpy(&split[h][i * row_bytes], &rows[(i * heads + h) * row_bytes], row_bytes);
    }
  }
  return split;
}

std::vector<float> Floats(DType dtype, std::span<const std::byte> rows) {
  std::vector<float> floats(rows.size() / DTypeBytes(dtype));
  ConvertToFloat(dtype, rows.data(), floats.size(), floats.data());
  return floats;
}

RecordedLayer FromTrace(const ModelShape& shape, const LayerTrace& trace) {
  RecordedLayer layer;
  layer.layer = trace.layer;
  layer.token_count = static_cast<uint32_t>(trace.token_count);
  layer.query_heads = shape.query_head_count;
  layer.kv_heads = shape.kv_head_count;
  layer.key_dim = shape.key_dim;
  layer.value_dim = shape.value_dim;
  layer.dtype = shape.dtype;
  layer.scale = shape.softmax_scale;
  layer.keys = SplitHeads(trace.keys, layer.kv_heads, shape.key_bytes());
  layer.values = SplitHeads(trace.values, layer.kv_heads, shape.value_bytes());
  const size_t step = size_t{layer.query_heads} * layer.key_dim;
  for (size_t i = 0; i < trace.token_counts.size(); ++i) {
    const auto first = trace.queries.begin() + static_cast<ptrdiff_t>(i * step);
    layer.queries.push_back({static_cast<uint32_t>(trace.token_counts[i]),
                             std::vector<float>(first, first + static_cast<ptrdiff_t>(step))});
  }
  std::ranges::stable_sort(layer.queries, {}, &RecordedQuery::token_count);
  return layer;
}

}  // namespace

std::vector<float> RecordedLayer::Keys(uint32_t kv_head) const {
  return Floats(dtype, keys[kv_head]);
}

std::vector<float> RecordedLayer::Values(uint32_t kv_head) const {
  return Floats(dtype, values[kv_head]);
}

std::vector<RecordedLayer> ReadLayers(const std::string& path, std::span<const uint32_t> layers) {
  const absl::StatusOr<LayerTraces> traces = LoadLayerTraces(path, layers);
  WAVEKV_CHECK(traces.ok(), std::string(traces.status().message()).c_str());
  std::vector<RecordedLayer> read;
  for (const LayerTrace& trace : traces->layers) {
    read.push_back(FromTrace(traces->sequence.shape, trace));
  }
  return read;
}

}  // namespace wavekv::bench
