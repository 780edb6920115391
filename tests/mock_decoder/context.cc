#include "tests/mock_decoder/context.h"

#include <algorithm>

namespace wavekv::mock {
namespace {
constexpr uint64_t kTaskTokens = 1024;
}  // namespace

Context::Context(const Model& model, std::span<const uint32_t> tokens, ThreadPool* pool)
    : config_(model.config()),
      token_count_(tokens.size()),
      row_bytes_(kHeadDim * DTypeBytes(config_.dtype)),
      token_bytes_(row_bytes_ * config_.kv_head_count),
      keys_(config_.layer_count * token_count_ * token_bytes_),
      values_(keys_.size()) {
  const size_t tasks = (token_count_ + kTaskTokens - 1) / kTaskTokens;
  pool->ParallelFor(tasks, [&](size_t task) {
    const uint64_t first = task * kTaskTokens;
    Generate(model, tokens, first, std::min(first + kTaskTokens, token_count_));
  });
}

void Context::Generate(const Model& model, std::span<const uint32_t> tokens, uint64_t first,
                       uint64_t last) {
  for (uint64_t position = first; position < last; ++position) {
    const Rotation rotation = model.RotationAt(position);
    for (uint32_t layer = 0; layer < config_.layer_count; ++layer) {
      for (uint32_t kv_head = 0; kv_head < config_.kv_head_count; ++kv_head) {
        float key[kHeadDim];
        float value[kHeadDim];
        model.KeyValue(layer, kv_head, tokens[position], position, rotation, key, value);
        SetKey(layer, kv_head, position, key);
        SetValue(layer, kv_head, position, value);
      }
    }
  }
}

RowsView Context::Rows(uint32_t layer, uint32_t kv_head) const {
  const size_t offset = Offset(layer, 0) + kv_head * row_bytes_;
  return {keys_.data() + offset, values_.data() + offset, token_bytes_, config_.dtype};
}

void Context::ReadKey(uint32_t layer, uint32_t kv_head, uint64_t position, float* key) const {
  ConvertToFloat(config_.dtype, keys_.data() + Offset(layer, position) + kv_head * row_bytes_,
                 kHeadDim, key);
}

void Context::SetKey(uint32_t layer, uint32_t kv_head, uint64_t position, const float* key) {
  ConvertFromFloat(config_.dtype, key, kHeadDim,
                   keys_.data() + Offset(layer, position) + kv_head * row_bytes_);
}

void Context::SetValue(uint32_t layer, uint32_t kv_head, uint64_t position, const float* value) {
  ConvertFromFloat(config_.dtype, value, kHeadDim,
                   values_.data() + Offset(layer, position) + kv_head * row_bytes_);
}

const std::byte* Context::Keys(uint32_t layer, uint64_t position) const {
  return keys_.data() + Offset(layer, position);
}

const std::byte* Context::Values(uint32_t layer, uint64_t position) const {
  return values_.data() + Offset(layer, position);
}

}  // namespace wavekv::mock
