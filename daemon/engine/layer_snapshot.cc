#include "daemon/engine/layer_snapshot.h"

namespace wavekv {

uint64_t LayerSnapshot::steady_tokens() const {
  const uint64_t clustered_end = version->clustered_end();
  return sink_count() + (token_count > clustered_end ? token_count - clustered_end : 0);
}

RowRuns LayerSnapshot::SteadyRuns(uint32_t kv_head) const {
  RowRuns runs;
  ForEachSteadyPiece([&](const RowChunk& chunk, const TokenRange& piece) {
    runs.push_back(chunk.Rows(*shape, kv_head, piece));
  });
  return runs;
}

std::vector<uint64_t> LayerSnapshot::SteadyPositions() const {
  std::vector<uint64_t> positions;
  ForEachSteadyPiece([&](const RowChunk&, const TokenRange& piece) {
    for (uint64_t position = piece.begin; position < piece.end; ++position) {
      positions.push_back(position);
    }
  });
  return positions;
}

std::vector<std::shared_ptr<const void>> LayerSnapshot::SteadyOwners() const {
  std::vector<std::shared_ptr<const void>> owners;
  ForEachSteadyPiece(
      [&](const RowChunk& chunk, const TokenRange&) { owners.push_back(chunk.owner); });
  return owners;
}

}  // namespace wavekv
