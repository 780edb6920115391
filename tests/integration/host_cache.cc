#include "tests/integration/host_cache.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/mock_decoder/counter_random.h"

namespace wavekv::integration {
namespace {

float Round(DType dtype, float value) {
  std::byte bytes[4];
  ConvertFromFloat(dtype, &value, 1, bytes);
  ConvertToFloat(dtype, bytes, 1, &value);
  return value;
}

}  // namespace

HostCache::HostCache(const ModelShape& shape, uint64_t token_count, const Element& key_at,
                     const Element& value_at)
    : shape_(shape), token_count_(token_count) {
  const size_t rows = shape.layer_count * token_count * shape.kv_head_count;
  keys_.resize(rows * shape.key_dim);
  values_.resize(rows * shape.value_dim);
  for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
    for (uint64_t position = 0; position < token_count; ++position) {
      for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
        for (uint32_t d = 0; d < shape.key_dim; ++d) {
          SetKey(layer, position, head, d, key_at(layer, position, head, d));
        }
        for (uint32_t d = 0; d < shape.value_dim; ++d) {
          values_[Index(layer, position, head, d, shape.value_dim)] =
              Round(shape.dtype, value_at(layer, position, head, d));
        }
      }
    }
  }
}

HostCache HostCache::Random(const ModelShape& shape, uint64_t token_count, uint64_t seed) {
  const auto gauss = [seed](uint64_t kind) {
    return [seed, kind](uint32_t layer, uint64_t position, uint32_t head, uint32_t d) {
      return mock::GaussFromWord(mock::StreamKey({seed, kind, layer, position, head, d}));
    };
  };
  return HostCache(shape, token_count, gauss(1), gauss(2));
}

float HostCache::Key(uint32_t layer, uint64_t position, uint32_t kv_head, uint32_t d) const {
  return keys_[Index(layer, position, kv_head, d, shape_.key_dim)];
}

float HostCache::Value(uint32_t layer, uint64_t position, uint32_t kv_head, uint32_t d) const {
  return values_[Index(layer, position, kv_head, d, shape_.value_dim)];
}

void HostCache::SetKey(uint32_t layer, uint64_t position, uint32_t kv_head, uint32_t d, float key) {
  keys_[Index(layer, position, kv_head, d, shape_.key_dim)] = Round(shape_.dtype, key);
}

HostCache::Chunk HostCache::Slice(uint64_t first, uint64_t count, uint32_t first_layer,
                                  uint32_t layer_count, client::Layout layout) {
  Chunk chunk;
  for (uint32_t i = 0; i < layer_count; ++i) chunk.layers.push_back(first_layer + i);
  const bool hnd = layout == client::Layout::kHND;
  const auto copy = [&](const std::vector<float>& source, uint32_t dim,
                        std::vector<std::byte>* bytes) {
    std::vector<float> rows;
    rows.reserve(layer_count * count * shape_.kv_head_count * dim);
    const uint64_t outer_count = hnd ? shape_.kv_head_count : count;
    const uint64_t inner_count = hnd ? count : shape_.kv_head_count;
    for (uint32_t layer : chunk.layers) {
      for (uint64_t outer = 0; outer < outer_count; ++outer) {
        for (uint64_t inner = 0; inner < inner_count; ++inner) {
          const uint64_t position = first + (hnd ? inner : outer);
          const auto head = static_cast<uint32_t>(hnd ? outer : inner);
          const float* row = source.data() + Index(layer, position, head, 0, dim);
          rows.insert(rows.end(), row, row + dim);
        }
      }
    }
    bytes->resize(rows.size() * DTypeBytes(shape_.dtype));
    ConvertFromFloat(shape_.dtype, rows.data(), rows.size(), bytes->data());
    std::vector<int64_t> axes = {layer_count, static_cast<int64_t>(outer_count),
                                 static_cast<int64_t>(inner_count), dim};
    return client::Tensor{shape_.dtype, std::move(axes), bytes->data(), layout};
  };
  chunk.keys = copy(keys_, shape_.key_dim, &key_bytes_);
  chunk.values = copy(values_, shape_.value_dim, &value_bytes_);
  return chunk;
}

HostCache::Exact HostCache::Attend(uint32_t layer, std::span<const float> queries,
                                   uint64_t count) const {
  Exact exact;
  exact.out.assign(static_cast<size_t>(shape_.query_head_count) * shape_.value_dim, 0.0);
  for (uint32_t query_head = 0; query_head < shape_.query_head_count; ++query_head) {
    const uint32_t kv_head = query_head / shape_.group_size();
    std::vector<double> logits(count);
    double max = -std::numeric_limits<double>::infinity();
    const float* const query = queries.data() + query_head * shape_.key_dim;
    for (uint64_t position = 0; position < count; ++position) {
      const float* const key = keys_.data() + Index(layer, position, kv_head, 0, shape_.key_dim);
      for (uint32_t d = 0; d < shape_.key_dim; ++d) {
        logits[position] += static_cast<double>(query[d]) * key[d];
      }
      logits[position] *= shape_.softmax_scale;
      max = std::max(max, logits[position]);
    }
    double mass = 0;
    double* out = exact.out.data() + static_cast<size_t>(query_head) * shape_.value_dim;
    for (uint64_t position = 0; position < count; ++position) {
      const double weight = std::exp(logits[position] - max);
      mass += weight;
      const float* const value =
          values_.data() + Index(layer, position, kv_head, 0, shape_.value_dim);
      for (uint32_t d = 0; d < shape_.value_dim; ++d) out[d] += weight * value[d];
    }
    for (uint32_t d = 0; d < shape_.value_dim && count > 0; ++d) out[d] /= mass;
    exact.lse.push_back(count > 0 ? max + std::log(mass) : max);
  }
  return exact;
}

std::vector<float> RandomQueries(const ModelShape& shape, uint64_t seed, float scale) {
  std::vector<float> queries(static_cast<size_t>(shape.query_head_count) * shape.key_dim);
  mock::FillGauss(mock::StreamKey({seed, 3}), queries.size(), scale, queries.data());
  return queries;
}

client::Tensor QueryTensor(const ModelShape& shape, std::span<const float> queries) {
  return {DType::kF32, {shape.query_head_count, shape.key_dim}, queries.data()};
}

double RelativeError(std::span<const float> found, std::span<const double> exact) {
  double difference = 0;
  double norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    difference += (found[i] - exact[i]) * (found[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace wavekv::integration
