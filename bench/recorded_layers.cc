#include "bench/recorded_layers.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "bench/npy.h"
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

RecordedLayer ReadNpyLayer(const std::string& directory, uint32_t number,
                           std::span<const float> positions) {
  const std::string suffix = "_l" + std::to_string(number) + ".npy";
  const NpyArray keys = ReadNpy(directory + "/k" + suffix);
  const NpyArray values = ReadNpy(directory + "/v" + suffix);
  const NpyArray queries = ReadNpy(directory + "/q" + suffix);
  WAVEKV_CHECK(keys.half && values.half && keys.shape.size() == 3 && keys.shape == values.shape &&
                   queries.shape.size() == 3 && queries.shape[0] == positions.size() &&
                   queries.shape[2] == keys.shape[2] && queries.shape[1] % keys.shape[1] == 0,
               (directory + ": arrays of one layer do not fit each other").c_str());
  RecordedLayer layer;
  layer.layer = number;
  layer.token_count = keys.shape[0];
  layer.query_heads = queries.shape[1];
  layer.kv_heads = keys.shape[1];
  layer.key_dim = layer.value_dim = keys.shape[2];
  layer.scale = 1 / std::sqrt(static_cast<float>(layer.key_dim));
  const size_t row_bytes = layer.key_dim * DTypeBytes(layer.dtype);
  layer.keys = SplitHeads(std::as_bytes(std::span(keys.bytes)), layer.kv_heads, row_bytes);
  layer.values = SplitHeads(std::as_bytes(std::span(values.bytes)), layer.kv_heads, row_bytes);
  const size_t step = size_t{layer.query_heads} * layer.key_dim;
  for (size_t i = 0; i < positions.size(); ++i) {
    layer.queries.push_back(
        {static_cast<uint32_t>(positions[i]) + 1, queries.Floats(i * step, step)});
  }
  return layer;
}

std::vector<RecordedLayer> ReadNpyLayers(const std::string& directory,
                                         std::span<const uint32_t> wanted) {
  const NpyArray array = ReadNpy(directory + "/positions.npy");
  const std::vector<float> positions = array.Floats(0, array.shape[0]);
  std::vector<RecordedLayer> layers;
  for (uint32_t l = 0; l < kLayersMax; ++l) {
    if (!wanted.empty() && std::ranges::find(wanted, l) == wanted.end()) continue;
    if (!std::filesystem::exists(directory + "/q_l" + std::to_string(l) + ".npy")) continue;
    layers.push_back(ReadNpyLayer(directory, l, positions));
  }
  return layers;
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

std::vector<RecordedLayer> ReadLayers(const std::string& path, std::span<const uint32_t> layers) {
  if (std::filesystem::is_directory(path)) return ReadNpyLayers(path, layers);
  const absl::StatusOr<LayerTraces> traces = LoadLayerTraces(path, layers);
  WAVEKV_CHECK(traces.ok(), std::string(traces.status().message()).c_str());
  std::vector<RecordedLayer> read;
  for (const LayerTrace& trace : traces->layers) {
    read.push_back(FromTrace(traces->sequence.shape, trace));
  }
  return read;
}

}  // namespace wavekv::bench
