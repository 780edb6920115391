// K and V of a small sequence on the test's side, and the definition of attention over them.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "client/types.h"
#include "storage/base/model_shape.h"

namespace wavekv::integration {

// [layers, tokens, kv_heads, dim] of shape.dtype, every element what `key_at` and `value_at` say.
class HostCache {
 public:
  using Element =
      std::function<float(uint32_t layer, uint64_t position, uint32_t kv_head, uint32_t d)>;

  HostCache(const ModelShape& shape, uint64_t token_count, const Element& key_at,
            const Element& value_at);
  // Keys and values of unit variance.
  static HostCache Random(const ModelShape& shape, uint64_t token_count, uint64_t seed);

  const ModelShape& shape() const { return shape_; }
  uint64_t token_count() const { return token_count_; }

  // Tokens [first, first + count) of consecutive layers, copied to where the tensors point; they
  // are valid until the next call.
  struct Chunk {
    std::vector<uint32_t> layers;
    client::Tensor keys;
    client::Tensor values;
  };
  Chunk Slice(uint64_t first, uint64_t count, uint32_t first_layer, uint32_t layer_count,
              client::Layout layout = client::Layout::kNHD);
  Chunk All() { return Slice(0, token_count_, 0, shape_.layer_count); }

  // One element as stored, after rounding to the dtype.
  float Key(uint32_t layer, uint64_t position, uint32_t kv_head, uint32_t d) const;
  float Value(uint32_t layer, uint64_t position, uint32_t kv_head, uint32_t d) const;
  void SetKey(uint32_t layer, uint64_t position, uint32_t kv_head, uint32_t d, float key);

  struct Exact {
    std::vector<double> out;  // [query_heads, value_dim]
    std::vector<double> lse;  // [query_heads]
  };
  // Attention over the first `count` tokens, in float64. `queries` [query_heads, key_dim].
  Exact Attend(uint32_t layer, std::span<const float> queries, uint64_t count) const;

 private:
  size_t Index(uint32_t layer, uint64_t position, uint32_t kv_head, uint32_t d,
               uint32_t dim) const {
    return ((layer * token_count_ + position) * shape_.kv_head_count + kv_head) * dim + d;
  }

  const ModelShape shape_;
  const uint64_t token_count_;
  std::vector<float> keys_;  // Rounded to the dtype.
  std::vector<float> values_;
  std::vector<std::byte> key_bytes_;  // Of the last slice.
  std::vector<std::byte> value_bytes_;
};

// [query_heads, key_dim] of unit variance times `scale`.
std::vector<float> RandomQueries(const ModelShape& shape, uint64_t seed, float scale = 1.0f);
// A view of `queries` as the SDK takes it.
client::Tensor QueryTensor(const ModelShape& shape, std::span<const float> queries);

// ||found - exact|| / ||exact|| over all query heads.
double RelativeError(std::span<const float> found, std::span<const double> exact);

}  // namespace wavekv::integration
