#include "daemon/engine/layer_content.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/string_view.h"
#include "daemon/engine/validation.h"
#include "storage/base/shared_memory.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// From so many rows on, asking for their pages at once is cheaper than a fault for each.
constexpr uint64_t kBulkTokens = 32;

// First position that a layer of this content has no memory for, the sink aside.
uint64_t ChunksEnd(const LayerContent& content) {
  if (!content.chunks->empty()) return content.chunks->back().end_position();
  return ChunkBegin(std::max(content.token_count, kSinkTokens));
}

// Calls write(chunk, piece) for the sink and the chunks that `range` touches.
template <class Write>
void ForEachPiece(const LayerContent& content, const TokenRange& range, Write write) {
  if (range.begin < kSinkTokens) {
    write(content.sink, TokenRange{range.begin, std::min(range.end, kSinkTokens)});
  }
  for (const RowChunk& chunk : *content.chunks) {
    const TokenRange piece = {std::max({chunk.first_position, range.begin, kSinkTokens}),
                              std::min(chunk.end_position(), range.end)};
    if (piece.begin < piece.end) write(chunk, piece);
  }
}

// Copies rows `range` of the snapshot into `content`'s own memory.
void CopyRows(const LayerSnapshot& snapshot, const TokenRange& range, const LayerContent& content) {
  if (range.begin >= range.end) return;
  const ModelShape& shape = *snapshot.shape;
  const uint64_t first_chunk = content.chunks->empty() ? 0 : content.chunks->front().first_position;
  for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
    snapshot.VisitRows(
        head, range, [&](uint64_t position, const std::byte* key, const std::byte* value) {
          const RowChunk& target = position < kSinkTokens
                                       ? content.sink
                                       : (*content.chunks)[(position - first_chunk) / kChunkTokens];
          std::memcpy(target.Key(shape, head, position), key, shape.key_bytes());
          std::memcpy(target.Value(shape, head, position), value, shape.value_bytes());
        });
  }
}

}  // namespace

absl::StatusOr<LayerGrowth> AllocateGrowth(const LayerContent& content, uint32_t layer,
                                           uint64_t end, SequenceMemory* memory) {
  LayerGrowth growth;
  if (end > content.token_count && content.sink.base == nullptr) {
    WAVEKV_ASSIGN_OR_RETURN(growth.sink, memory->AllocateSink());
  }
  if (end <= kSinkTokens) return growth;
  for (uint64_t begin = ChunksEnd(content); begin < end; begin += kChunkTokens) {
    WAVEKV_ASSIGN_OR_RETURN(RowChunk chunk, memory->AllocateChunk(layer, begin));
    growth.chunks.push_back(std::move(chunk));
  }
  return growth;
}

LayerContent Grown(LayerContent content, LayerGrowth growth, uint64_t end) {
  if (growth.sink.base != nullptr) content.sink = std::move(growth.sink);
  if (!growth.chunks.empty()) {
    auto chunks = std::make_shared<ChunkList>(*content.chunks);
    chunks->insert(chunks->end(), growth.chunks.begin(), growth.chunks.end());
    content.chunks = std::move(chunks);
  }
  content.token_count = std::max(content.token_count, end);
  return content;
}

absl::Status WriteHeadRows(const ModelShape& shape, const RowBatch& batch, size_t layer_idx,
                           uint32_t kv_head, const TokenRange& range, const LayerContent& content) {
  absl::Status status;
  // Copies rows, then looks at the copy: the source may change under us.
  const auto write = [&](absl::string_view name, const TensorRows& rows, const TokenRange& piece,
                         uint32_t dim, std::byte* target) {
    if (!status.ok()) return;
    const size_t count = piece.size() * dim;
    if (piece.size() >= kBulkTokens) PopulatePages(target, count * DTypeBytes(shape.dtype));
    rows.Copy(layer_idx, piece.begin - batch.range.begin, kv_head, piece.size(), target);
    if (batch.finite) return;
    const size_t found = FirstNonFinite(shape.dtype, target, count);
    if (found == count) return;
    status = NotFiniteError(name, batch.layers[layer_idx], piece.begin + found / dim, kv_head,
                            found % dim);
  };
  ForEachPiece(content, range, [&](const RowChunk& chunk, const TokenRange& piece) {
    write("keys", batch.keys, piece, shape.key_dim, chunk.Key(shape, kv_head, piece.begin));
    write("values", batch.values, piece, shape.value_dim, chunk.Value(shape, kv_head, piece.begin));
  });
  return status;
}

absl::StatusOr<LayerContent> FirstTokens(const LayerSnapshot& snapshot, uint32_t layer,
                                         uint64_t token_count, uint64_t clustered_end,
                                         bool copy_partial, SequenceMemory* memory) {
  LayerContent content;
  content.token_count = token_count;
  if (token_count == 0) return content;
  const bool own_sink = copy_partial && token_count < kSinkTokens;
  if (own_sink) {
    WAVEKV_ASSIGN_OR_RETURN(content.sink, memory->AllocateSink());
    CopyRows(snapshot, {0, token_count}, content);
  } else {
    content.sink = snapshot.sink;
  }
  if (token_count <= kSinkTokens) return content;

  const uint64_t chunks_begin = ChunkBegin(clustered_end);
  const uint64_t shared_begin =
      snapshot.chunks->empty() ? token_count : snapshot.chunks->front().first_position;
  const uint64_t shared_end = copy_partial ? ChunkBegin(token_count) : token_count;
  ChunkList chunks;
  for (uint64_t begin = chunks_begin; begin < token_count; begin += kChunkTokens) {
    if (begin >= shared_begin && begin < shared_end) {
      chunks.push_back((*snapshot.chunks)[(begin - shared_begin) / kChunkTokens]);
      continue;
    }
    WAVEKV_ASSIGN_OR_RETURN(RowChunk chunk, memory->AllocateChunk(layer, begin));
    chunks.push_back(std::move(chunk));
  }
  content.chunks = std::make_shared<const ChunkList>(std::move(chunks));
  CopyRows(snapshot, {std::max(chunks_begin, kSinkTokens), std::min(shared_begin, token_count)},
           content);
  CopyRows(snapshot, {std::max({shared_begin, shared_end, chunks_begin, kSinkTokens}), token_count},
           content);
  return content;
}

}  // namespace wavekv
