// Keys and values of a whole context as an engine holds them: in the model's dtype, layer by layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "storage/base/thread_pool.h"
#include "tests/mock_decoder/model.h"

namespace wavekv::mock {

// Rows of one (layer, KV head): row of position p begins at data + p * stride_bytes.
struct RowsView {
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  size_t stride_bytes = 0;
  DType dtype = DType::kBF16;
};

// Not thread-safe while rows are being set; reading is.
class Context {
 public:
  // Generates K and V of every token; token i is at position i.
  Context(const Model& model, std::span<const uint32_t> tokens, ThreadPool* pool);

  uint64_t token_count() const { return token_count_; }
  RowsView Rows(uint32_t layer, uint32_t kv_head) const;
  void ReadKey(uint32_t layer, uint32_t kv_head, uint64_t position, float* key) const;
  void SetKey(uint32_t layer, uint32_t kv_head, uint64_t position, const float* key);
  void SetValue(uint32_t layer, uint32_t kv_head, uint64_t position, const float* value);

  // [tokens, kv_heads, kHeadDim] of consecutive positions of one layer, and its size in bytes.
  const std::byte* Keys(uint32_t layer, uint64_t position) const;
  const std::byte* Values(uint32_t layer, uint64_t position) const;
  size_t token_bytes() const { return token_bytes_; }

 private:
  void Generate(const Model& model, std::span<const uint32_t> tokens, uint64_t first,
                uint64_t last);
  size_t Offset(uint32_t layer, uint64_t position) const {
    return (layer * token_count_ + position) * token_bytes_;
  }

  const ModelConfig config_;
  const uint64_t token_count_;
  const size_t row_bytes_;         // One head's key or value.
  const size_t token_bytes_;       // All heads' keys, or values, of a token.
  std::vector<std::byte> keys_;    // [layers, tokens, kv_heads, kHeadDim]
  std::vector<std::byte> values_;  // Likewise.
};

}  // namespace wavekv::mock
