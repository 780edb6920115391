#include "daemon/engine/sequence_memory.h"

#include <algorithm>

#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr uint64_t kAlignment = 64;  // Of runs, and of each head's K and V in a segment.

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

constexpr uint64_t DivideUp(uint64_t value, uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}

// The longest segment a sequence can have.
uint64_t LongestSegment(const SequenceSpec& spec) {
  if (spec.max_tokens < kSinkTokens + spec.index.small_segment_tokens + kLocalTokens) return 0;
  return std::min<uint64_t>(spec.index.segment_tokens, RoundUp(spec.max_tokens, kChunkTokens));
}

// Index bytes of one token of one layer, all heads. Splitting of wide and of large clusters makes
// more of them than tokens / tokens_per_cluster; the excess seen stays under a half.
uint64_t IndexBytesPerToken(const SequenceSpec& spec) {
  const uint64_t cluster_bytes =
      2 * (spec.shape.key_dim + spec.shape.value_dim) + 2 + 3 * 4 + 2 * 4;
  const uint64_t per_head = DivideUp(3 * cluster_bytes, 2 * spec.index.tokens_per_cluster) + 2;
  return per_head * spec.shape.kv_head_count;
}

}  // namespace

uint64_t ClusteredLayerCount(const SequenceSpec& spec) {
  return LongestSegment(spec) == 0 ? 0 : spec.shape.layer_count - spec.index.dense_layers.size();
}

MemoryPlan PlanMemory(const SequenceSpec& spec, uint32_t build_threads) {
  const uint64_t layers = spec.shape.layer_count;
  const uint64_t clustered_layers = ClusteredLayerCount(spec);
  const uint64_t longest = LongestSegment(spec);
  // Rows, then for each layer two copies of a partial chunk (truncation) and room for a stretch
  // beside its small segments; re-clustering needs the stretch once more, in the layers at work.
  const uint64_t tokens = layers * (RoundUp(spec.max_tokens, kChunkTokens) + 2 * kChunkTokens) +
                          clustered_layers * longest +
                          std::min<uint64_t>(build_threads, clustered_layers) * longest;
  const uint64_t sinks = layers * RoundUp(kSinkTokens * spec.shape.token_bytes(), kAlignment);
  const uint64_t segments_per_layer =
      spec.max_tokens / spec.index.segment_tokens + longest / spec.index.small_segment_tokens + 2;
  const uint64_t padding =
      clustered_layers * segments_per_layer * spec.shape.kv_head_count * 2 * kAlignment;
  MemoryPlan plan;
  plan.arena_bytes = RoundUp(tokens * spec.shape.token_bytes() + sinks + padding, 4096);
  plan.reserved_bytes =
      plan.arena_bytes + clustered_layers * spec.max_tokens * IndexBytesPerToken(spec);
  return plan;
}

// The rows of one stretch of one layer, handed out chunk by chunk. A slot comes back when the last
// reader of its chunk has gone, so that rows of a truncated chunk are not written again before.
class SequenceMemory::Frame : public std::enable_shared_from_this<Frame> {
 public:
  Frame(std::shared_ptr<Run> run, uint64_t chunk_bytes, uint32_t chunk_count)
      : run_(std::move(run)), chunk_bytes_(chunk_bytes) {
    for (uint32_t slot = chunk_count; slot > 0; --slot) free_slots_.push_back(slot - 1);
  }

  // False when every slot is in use.
  bool Take(RowChunk* chunk) {
    MutexLock lock(&mutex_);
    if (free_slots_.empty()) return false;
    const uint32_t slot = free_slots_.back();
    free_slots_.pop_back();
    chunk->base = run_->data() + slot * chunk_bytes_;
    chunk->owner = std::shared_ptr<const void>(
        chunk->base, [frame = shared_from_this(), slot](const void*) { frame->Return(slot); });
    return true;
  }

 private:
  void Return(uint32_t slot) {
    MutexLock lock(&mutex_);
    free_slots_.push_back(slot);
  }

  const std::shared_ptr<Run> run_;
  const uint64_t chunk_bytes_;
  Mutex mutex_;
  std::vector<uint32_t> free_slots_ ABSL_GUARDED_BY(mutex_);
};

absl::StatusOr<std::unique_ptr<SequenceMemory>> SequenceMemory::Create(
    std::shared_ptr<BlockPool> pool, const TenantId& tenant, const SequenceSpec& spec,
    uint32_t build_threads, std::string label) {
  const MemoryPlan plan = PlanMemory(spec, build_threads);
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena,
                          pool->CreateArena(tenant, plan.arena_bytes, plan.reserved_bytes, label));
  return std::unique_ptr<SequenceMemory>(
      new SequenceMemory(std::move(pool), std::move(arena), spec, std::move(label)));
}

SequenceMemory::SequenceMemory(std::shared_ptr<BlockPool> pool, std::shared_ptr<Arena> arena,
                               const SequenceSpec& spec, std::string label)
    : pool_(std::move(pool)),
      arena_(std::move(arena)),
      label_(std::move(label)),
      token_bytes_(spec.shape.token_bytes()),
      segment_tokens_(spec.index.segment_tokens),
      max_tokens_(spec.max_tokens) {}

absl::StatusOr<RowChunk> SequenceMemory::AllocateSink() {
  MutexLock lock(&mutex_);
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Run> run, Allocate(kSinkTokens * token_bytes_));
  std::byte* const base = run->data();
  return RowChunk{base, 0, kSinkTokens, std::move(run)};
}

absl::StatusOr<RowChunk> SequenceMemory::AllocateChunk(uint32_t layer, uint64_t first_position) {
  MutexLock lock(&mutex_);
  RowChunk chunk = {nullptr, first_position, kChunkTokens, nullptr};
  const std::shared_ptr<Frame> frame = FrameOf(layer, first_position / segment_tokens_);
  if (frame != nullptr && frame->Take(&chunk)) return chunk;
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Run> run, Allocate(kChunkTokens * token_bytes_));
  chunk.base = run->data();
  chunk.owner = std::move(run);
  return chunk;
}

absl::StatusOr<std::shared_ptr<Run>> SequenceMemory::AllocateSegment(uint64_t bytes) {
  MutexLock lock(&mutex_);
  return Allocate(bytes);
}

uint64_t SequenceMemory::reserved_bytes() const {
  MutexLock lock(&mutex_);
  uint64_t bytes = arena_->reserved_bytes();
  for (const std::weak_ptr<Arena>& overflow : overflow_) {
    if (const std::shared_ptr<Arena> arena = overflow.lock()) bytes += arena->reserved_bytes();
  }
  return bytes;
}

std::shared_ptr<SequenceMemory::Frame> SequenceMemory::FrameOf(uint32_t layer, uint64_t stretch) {
  std::weak_ptr<Frame>& known = frames_[{layer, stretch}];
  std::shared_ptr<Frame> frame = known.lock();
  if (frame != nullptr) return frame;
  std::erase_if(frames_, [&](const auto& entry) {
    return entry.first != std::pair(layer, stretch) && entry.second.expired();
  });
  const uint64_t begin = stretch * segment_tokens_;
  const uint64_t tokens =
      std::min(segment_tokens_, RoundUp(std::max(max_tokens_, begin + 1) - begin, kChunkTokens));
  absl::StatusOr<std::shared_ptr<Run>> run = AllocateReserved(tokens * token_bytes_);
  if (!run.ok()) return nullptr;
  frame = std::make_shared<Frame>(*std::move(run), kChunkTokens * token_bytes_,
                                  static_cast<uint32_t>(tokens / kChunkTokens));
  frames_[{layer, stretch}] = frame;
  return frame;
}

absl::StatusOr<std::shared_ptr<Run>> SequenceMemory::AllocateReserved(uint64_t bytes) {
  absl::StatusOr<std::shared_ptr<Run>> run = arena_->Allocate(bytes);
  for (size_t i = 0; !run.ok() && i < overflow_.size(); ++i) {
    const std::shared_ptr<Arena> arena = overflow_[i].lock();
    if (arena != nullptr) run = arena->Allocate(bytes);
  }
  return run;
}

absl::StatusOr<std::shared_ptr<Run>> SequenceMemory::Allocate(uint64_t bytes) {
  absl::StatusOr<std::shared_ptr<Run>> run = AllocateReserved(bytes);
  if (run.ok()) return run;
  std::erase_if(overflow_, [](const std::weak_ptr<Arena>& arena) { return arena.expired(); });
  const uint64_t overflow_bytes =
      RoundUp(std::max<uint64_t>(bytes, segment_tokens_ * token_bytes_) + kAlignment, 4096);
  WAVEKV_ASSIGN_OR_RETURN(
      std::shared_ptr<Arena> arena,
      pool_->CreateArena(arena_->tenant(), overflow_bytes, overflow_bytes, label_ + " overflow"));
  overflow_.push_back(arena);
  return arena->Allocate(bytes);
}

}  // namespace wavekv
