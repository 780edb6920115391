// Exact rows: where K and V of tokens lie before they are clustered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "daemon/engine/cut_plan.h"
#include "index/segment.h"
#include "storage/base/model_shape.h"

namespace wavekv {

inline constexpr uint64_t kChunkTokens = 128;  // Chunks begin at multiples of it.

// Memory for the rows of consecutive positions of one layer. Per KV head: K [capacity, key_dim],
// then V [capacity, value_dim], so that a head's rows are one run. The row of a position is fixed.
// A row is written once, before the layer's token count passes it, and never changes after.
struct RowChunk {
  std::byte* base = nullptr;
  uint64_t first_position = 0;
  uint32_t capacity = 0;
  std::shared_ptr<const void> owner;  // Keeps the memory.

  uint64_t end_position() const { return first_position + capacity; }

  std::byte* Key(const ModelShape& shape, uint32_t head, uint64_t position) const {
    return Head(shape, head) + (position - first_position) * shape.key_bytes();
  }
  std::byte* Value(const ModelShape& shape, uint32_t head, uint64_t position) const {
    return Head(shape, head) + capacity * shape.key_bytes() +
           (position - first_position) * shape.value_bytes();
  }
  // The rows of `range`, which lies in the chunk.
  RowRun Rows(const ModelShape& shape, uint32_t head, const TokenRange& range) const {
    return {Key(shape, head, range.begin), Value(shape, head, range.begin),
            static_cast<uint32_t>(range.size())};
  }

 private:
  std::byte* Head(const ModelShape& shape, uint32_t head) const {
    return base + head * static_cast<size_t>(capacity) * (shape.key_bytes() + shape.value_bytes());
  }
};

// Chunks in order of position, without gaps.
using ChunkList = std::vector<RowChunk>;

constexpr uint64_t ChunkBegin(uint64_t position) { return position / kChunkTokens * kChunkTokens; }

}  // namespace wavekv
