// Memory of one sequence: its arena, carved into frames of exact rows and runs of segments.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/engine/row_chunk.h"
#include "daemon/engine/types.h"
#include "storage/base/mutex.h"
#include "storage/block_pool.h"

namespace wavekv {

struct MemoryPlan {
  uint64_t arena_bytes = 0;
  uint64_t reserved_bytes = 0;  // The arena and an estimate of the index.
};

// What a sequence of spec.max_tokens tokens takes at most, `build_threads` segments of it being
// re-clustered at a time. `spec` has been validated.
MemoryPlan PlanMemory(const SequenceSpec& spec, uint32_t build_threads);

// Layers of `spec` that are clustered once they are long enough.
uint64_t ClusteredLayerCount(const SequenceSpec& spec);

// Chunks of a stretch lie in one frame of the stretch's size, so that clustering it frees a piece
// that the next segment fits into, whatever the order in which layers grow. What the arena cannot
// serve (chunks that a fork or a reader keeps) comes from an overflow arena, within the same
// limits of the pool.
//
// Thread-safe. Chunks and runs keep their arena and may outlive this object.
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
  absl::StatusOr<std::shared_ptr<Run>> AllocateSegment(uint64_t bytes);

  uint64_t reserved_bytes() const;

 private:
  class Frame;

  SequenceMemory(std::shared_ptr<BlockPool> pool, std::shared_ptr<Arena> arena,
                 const SequenceSpec& spec, std::string label);
  absl::StatusOr<std::shared_ptr<Run>> AllocateReserved(uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::shared_ptr<Run>> Allocate(uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<Frame> FrameOf(uint32_t layer, uint64_t stretch)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<BlockPool> pool_;
  const std::shared_ptr<Arena> arena_;
  const std::string label_;
  const size_t token_bytes_;
  const uint64_t segment_tokens_;
  const uint64_t max_tokens_;

  mutable Mutex mutex_;
  std::map<std::pair<uint32_t, uint64_t>, std::weak_ptr<Frame>> frames_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<Arena>> overflow_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv
