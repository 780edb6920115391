// Memory of one sequence: its arena of the block pool, carved into frames of equal size.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/engine/memory_frame.h"
#include "daemon/engine/row_chunk.h"
#include "daemon/engine/types.h"
#include "storage/base/mutex.h"
#include "storage/block_pool.h"

namespace wavekv {

// The most tokens that a sequence may be made for: with every other limit at its largest, the plan
// of its memory still fits 64 bits.
inline constexpr uint64_t kTokensMax = uint64_t{1} << 30;

struct MemoryPlan {
  uint64_t frame_tokens = 0;    // Of one frame: a stretch, or the whole of a shorter sequence.
  uint64_t frame_count = 0;     // Of that size.
  uint64_t arena_bytes = 0;     // The frames and what is smaller.
  uint64_t reserved_bytes = 0;  // The arena and an estimate of the index.
};

// What a sequence of spec.max_tokens tokens takes at most, `build_threads` segments of it being
// re-clustered at a time. `spec` has been validated.
MemoryPlan PlanMemory(const SequenceSpec& spec, uint32_t build_threads);

// The exact rows of a (layer, stretch) lie in one frame, its segments in another. As nearly all
// runs of an arena have one size, what is freed always fits what is asked for, whatever the order
// in which layers grow and are clustered: the reservation suffices. Frames of exact rows are
// private: a decoded token's row is clustered after a while, and its page goes back. What it cannot
// foresee (rows that a fork keeps, a truncation that dissolves a segment of a full sequence) comes
// from an overflow arena, within the same limits of the pool.
//
// Thread-safe. What it gave out keeps its arena and may outlive this object.
class SequenceMemory {
 public:
  // ResourceExhausted with the pool's text.
  static absl::StatusOr<std::unique_ptr<SequenceMemory>> Create(std::shared_ptr<BlockPool> pool,
                                                                const TenantId& tenant,
                                                                const SequenceSpec& spec,
                                                                uint32_t build_threads,
                                                                std::string label);

  // Rows [0, kSinkTokens) of a layer.
  absl::StatusOr<RowChunk> AllocateSink();
  // Rows [first_position, first_position + kChunkTokens); first_position is a multiple of that.
  absl::StatusOr<RowChunk> AllocateChunk(uint32_t layer, uint64_t first_position);
  // Payload of a segment of `range`, which lies in one stretch.
  absl::StatusOr<RowMemory> AllocateSegment(uint32_t layer, const TokenRange& range);

  // The sequence has ended: what nobody uses goes back to the pool, the rest with its last user.
  // Every later allocation is NotFound.
  void Close();

  uint64_t reserved_bytes() const;
  // Where segments lie, unless they had to go to an overflow arena; null once closed.
  std::shared_ptr<const Arena> arena() const;

 private:
  enum class Content : uint8_t { kRows, kSegments };
  using FrameKey = std::tuple<uint32_t, uint64_t, Content>;  // Layer, stretch, what it holds.

  SequenceMemory(std::shared_ptr<BlockPool> pool, std::shared_ptr<Arena> arena,
                 const SequenceSpec& spec, const MemoryPlan& plan, std::string label);
  absl::Status CheckOpen() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // From the arena, or from what overflow arenas have left.
  absl::StatusOr<std::shared_ptr<Run>> AllocateReserved(uint64_t bytes, Run::Place place)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The same in an arena's file, or from a new overflow arena.
  absl::StatusOr<std::shared_ptr<Run>> Allocate(uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<MemoryFrame> KnownFrame(const FrameKey& key)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<MemoryFrame> AddFrame(const FrameKey& key, std::shared_ptr<Run> run)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes `tokens` tokens from a shared frame of small pieces, made when first needed, or alone.
  absl::StatusOr<RowMemory> AllocateSmall(uint64_t tokens, uint64_t count,
                                          std::shared_ptr<MemoryFrame>* pieces)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<BlockPool> pool_;
  const TenantId tenant_;
  const std::string label_;
  const uint32_t layer_count_;
  const size_t token_bytes_;
  const uint64_t frame_tokens_;
  const uint64_t stretch_tokens_;

  mutable Mutex mutex_;
  std::shared_ptr<Arena> arena_ ABSL_GUARDED_BY(mutex_);  // Null once closed.
  std::vector<std::weak_ptr<Arena>> overflow_ ABSL_GUARDED_BY(mutex_);
  std::map<FrameKey, std::weak_ptr<MemoryFrame>> frames_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<MemoryFrame> sinks_ ABSL_GUARDED_BY(mutex_);
  // For copies of chunks whose place is in use: a truncated chunk that readers still see.
  std::shared_ptr<MemoryFrame> spare_chunks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv
