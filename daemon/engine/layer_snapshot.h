// What one reader sees of one layer: consistent, immutable, usable without any lock.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "daemon/engine/layer_version.h"
#include "daemon/engine/row_chunk.h"
#include "storage/base/ids.h"

namespace wavekv {

// Query heads' vectors of one step: [query_heads, key_dim]. Immutable, shared.
struct QueryVectors {
  std::shared_ptr<const float[]> floats;  // Null: none.
  size_t count = 0;

  std::span<const float> all() const { return {floats.get(), count}; }
};

// Runs of a few chunks, as a step over a few hundred tokens has them, need no memory.
using RowRuns = absl::InlinedVector<RowRun, 8>;

// Keeps alive all memory it names, but for `shape`, which lives with the sequence.
struct LayerSnapshot {
  const ModelShape* shape = nullptr;
  Generation generation;
  uint64_t token_count = 0;
  RowChunk sink;                            // Rows [0, min(kSinkTokens, token_count)).
  std::shared_ptr<const ChunkList> chunks;  // From a chunk at or below clustered_end() on.
  std::shared_ptr<const LayerVersion> version;
  QueryVectors last_queries;  // None before the first step.

  uint64_t sink_count() const { return std::min(token_count, kSinkTokens); }
  // Exact tokens of one KV head.
  uint64_t steady_tokens() const;
  // Exact rows of one KV head in order of position: sink, then what is not clustered.
  RowRuns SteadyRuns(uint32_t kv_head) const;
  // The token position of each row of SteadyRuns.
  std::vector<uint64_t> SteadyPositions() const;
  // The owners of SteadyRuns' memory, in the same order.
  std::vector<std::shared_ptr<const void>> SteadyOwners() const;

  // Calls visit(position, key row, value row) for every token of `range`, which lies in
  // [0, token_count); in order of position where rows are exact, of rows where they are clustered.
  template <class Visit>
  void VisitRows(uint32_t kv_head, const TokenRange& range, Visit visit) const;

 private:
  template <class Visit>
  void ForEachSteadyPiece(Visit visit) const;
};

template <class Visit>
void LayerSnapshot::ForEachSteadyPiece(Visit visit) const {
  if (sink_count() > 0) visit(sink, TokenRange{0, sink_count()});
  const uint64_t steady_begin = version->clustered_end();
  for (const RowChunk& chunk : *chunks) {
    const TokenRange piece = {std::max(chunk.first_position, steady_begin),
                              std::min(chunk.end_position(), token_count)};
    if (piece.begin < piece.end) visit(chunk, piece);
  }
}

template <class Visit>
void LayerSnapshot::VisitRows(uint32_t kv_head, const TokenRange& range, Visit visit) const {
  for (const auto& segment : version->segments()) {
    if (segment->range().end <= range.begin || segment->range().begin >= range.end) continue;
    const SegmentHead& head = segment->head(kv_head);
    for (uint32_t row = 0; row < head.token_count; ++row) {
      const uint64_t position = head.first_position + head.row_to_offset[row];
      if (position < range.begin || position >= range.end) continue;
      visit(position, head.keys + row * shape->key_bytes(),
            head.values + row * shape->value_bytes());
    }
  }
  ForEachSteadyPiece([&](const RowChunk& chunk, const TokenRange& piece) {
    for (uint64_t position = std::max(piece.begin, range.begin);
         position < std::min(piece.end, range.end); ++position) {
      visit(position, static_cast<const std::byte*>(chunk.Key(*shape, kv_head, position)),
            static_cast<const std::byte*>(chunk.Value(*shape, kv_head, position)));
    }
  });
}

}  // namespace wavekv
