#include "bench/recorded_layers.h"

#include <cmath>
#include <cstring>
#include <filesystem>

#include "bench/npy.h"
#include "storage/base/check.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kLayersMax = 1024;

// Rows [tokens, heads, dim] as one run for each head.
std::vector<std::vector<std::byte>> SplitHeads(const NpyArray& array, size_t row_bytes) {
  const size_t tokens = array.shape[0], heads = array.shape[1];
  std::vector<std::vector<std::byte>> split(heads, std::vector<std::byte>(tokens * row_bytes));
  for (size_t i = 0; i < tokens; ++i) {
    for (size_t h = 0; h < heads; ++h) {
      std::memcpy(&split[h][i * row_bytes], &array.bytes[(i * heads + h) * row_bytes], row_bytes);
    }
  }
  return split;
}

}  // namespace

std::vector<RecordedLayer> ReadNpyLayers(const std::string& directory) {
  const std::vector<float> positions = [&] {
    const NpyArray array = ReadNpy(directory + "/positions.npy");
    return array.Floats(0, array.shape[0]);
  }();
  std::vector<RecordedLayer> layers;
  for (uint32_t l = 0; l < kLayersMax; ++l) {
    const std::string suffix = "_l" + std::to_string(l) + ".npy";
    if (!std::filesystem::exists(directory + "/q" + suffix)) continue;
    const NpyArray keys = ReadNpy(directory + "/k" + suffix);
    const NpyArray values = ReadNpy(directory + "/v" + suffix);
    const NpyArray queries = ReadNpy(directory + "/q" + suffix);
    WAVEKV_CHECK(keys.half && values.half && keys.shape.size() == 3 && keys.shape == values.shape &&
                     queries.shape.size() == 3 && queries.shape[0] == positions.size() &&
                     queries.shape[2] == keys.shape[2] && queries.shape[1] % keys.shape[1] == 0,
                 (directory + ": arrays of one layer do not fit each other").c_str());
    RecordedLayer layer;
    layer.layer = l;
    layer.token_count = keys.shape[0];
    layer.query_heads = queries.shape[1];
    layer.kv_heads = keys.shape[1];
    layer.key_dim = layer.value_dim = keys.shape[2];
    layer.scale = 1 / std::sqrt(static_cast<float>(layer.key_dim));
    const size_t row_bytes = layer.key_dim * DTypeBytes(layer.dtype);
    layer.keys = SplitHeads(keys, row_bytes);
    layer.values = SplitHeads(values, row_bytes);
    const size_t step = size_t{layer.query_heads} * layer.key_dim;
    for (size_t i = 0; i < positions.size(); ++i) {
      layer.queries.push_back(
          {static_cast<uint32_t>(positions[i]) + 1, queries.Floats(i * step, step)});
    }
    layers.push_back(std::move(layer));
  }
  WAVEKV_CHECK(!layers.empty(), (directory + ": no q_l<layer>.npy there").c_str());
  return layers;
}

}  // namespace wavekv::bench
