// The rows and segments of one layer as values: growing them, and keeping only the first tokens.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/engine/layer_snapshot.h"
#include "daemon/engine/sequence_memory.h"
#include "daemon/engine/tensor_rows.h"

namespace wavekv {

// The exact rows of one layer. Every chunk of the list has all its rows from its first position
// (kSinkTokens in the first chunk) to the token count, clustered ones included.
struct LayerContent {
  uint64_t token_count = 0;
  RowChunk sink;  // Without memory while there are no tokens.
  std::shared_ptr<const ChunkList> chunks = std::make_shared<const ChunkList>();
};

// Memory that a layer needs to hold `end` tokens and does not have.
struct LayerGrowth {
  RowChunk sink;  // With memory only when the layer has none.
  ChunkList chunks;
};

// Allocates what lets a layer of this content grow to `end` tokens. ResourceExhausted.
absl::StatusOr<LayerGrowth> AllocateGrowth(const LayerContent& content, uint32_t layer,
                                           uint64_t end, SequenceMemory* memory);

// `content` with the growth's chunks, at `end` tokens.
LayerContent Grown(LayerContent content, LayerGrowth growth, uint64_t end);

// Writes rows `range` of the batch (part of its range) of one KV head to `content`, which has the
// memory and does not show the rows yet. InvalidArgument when what was written holds a NaN or an
// infinity: then it must never be shown. Heads may be written beside each other.
absl::Status WriteHeadRows(const ModelShape& shape, const RowBatch& batch, size_t layer_idx,
                           uint32_t kv_head, const TokenRange& range, const LayerContent& content);

// Rows of the first token_count tokens of a layer, `clustered_end` of them staying clustered.
// Chunks are shared with `snapshot`, but for those that lack rows, and for the last, partial one,
// which is copied when `copy_partial`, so that nobody else's rows are written when the layer grows
// again. The snapshot stays as it is. ResourceExhausted.
absl::StatusOr<LayerContent> FirstTokens(const LayerSnapshot& snapshot, uint32_t layer,
                                         uint64_t token_count, uint64_t clustered_end,
                                         bool copy_partial, SequenceMemory* memory);

}  // namespace wavekv
