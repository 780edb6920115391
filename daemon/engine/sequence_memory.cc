#include "daemon/engine/sequence_memory.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "index/token_sketch.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr uint64_t kRunAlignment = 64;
constexpr uint64_t kArenaAlignment = 4096;  // The pool charges whole pages, and so do private runs.
// Pieces for each layer in the frames of small pieces: the layer's sink and a copy of it beside
// (truncation within the sink); one copy of a partial chunk.
constexpr uint64_t kSinksPerLayer = 2;
constexpr uint64_t kSpareChunksPerLayer = 1;

constexpr uint64_t DivideUp(uint64_t value, uint64_t divisor) {
  return (value + divisor - 1) / divisor;
}

constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return DivideUp(value, multiple) * multiple;
}

// The codes and steps of one token and head; its cluster's error is among the cluster's bytes.
uint64_t SketchBytesPerToken(const ModelShape& shape) {
  return SketchRowBytes(shape.key_dim) + SketchRowBytes(shape.value_dim) + 2 * sizeof(uint16_t);
}

// Index bytes of one token of one layer, all heads. Splitting of wide and of large clusters makes
// more of them than tokens / tokens_per_cluster; half as many again is allowed for.
uint64_t IndexBytesPerToken(const SequenceSpec& spec) {
  // Codes, scales, size and its log, radii, spreads, first row and block.
  const uint64_t cluster_bytes = PanelDims(spec.shape.key_dim) + spec.shape.value_dim + 2 * 4 + 2 +
                                 4 + 3 * 4 + 2 * 4 + 2 * 4 + (spec.index.sketch ? 4 : 0);
  const uint64_t token_bytes = 2 + (spec.index.sketch ? SketchBytesPerToken(spec.shape) : 0);
  const uint64_t per_head =
      DivideUp(3 * cluster_bytes, 2 * spec.index.tokens_per_cluster) + token_bytes;
  return per_head * spec.shape.kv_head_count;
}

}  // namespace

MemoryPlan PlanMemory(const SequenceSpec& spec, uint32_t build_threads) {
  const uint64_t layers = spec.shape.layer_count;
  const uint64_t token_bytes = spec.shape.token_bytes();
  const bool ever_clustered =
      spec.max_tokens >= kSinkTokens + spec.index.small_segment_tokens + kLocalTokens;
  const uint64_t clustered_layers = ever_clustered ? layers - spec.index.dense_layers.size() : 0;
  MemoryPlan plan;
  plan.frame_tokens =
      std::min<uint64_t>(spec.index.segment_tokens, RoundUp(spec.max_tokens, kChunkTokens));
  // A stretch has a frame of rows until it is clustered, and then one of segments; the one that is
  // clustered now has both. Re-clustering takes a frame more, in the layers at work.
  plan.frame_count = layers * DivideUp(spec.max_tokens, plan.frame_tokens) + clustered_layers +
                     std::min<uint64_t>(build_threads, clustered_layers);
  const uint64_t bytes =
      RoundUp(plan.frame_tokens * token_bytes, kArenaAlignment) * plan.frame_count +
      RoundUp(layers * kSinksPerLayer * kSinkTokens * token_bytes, kRunAlignment) +
      RoundUp(layers * kSpareChunksPerLayer * kChunkTokens * token_bytes, kRunAlignment);
  plan.arena_bytes = RoundUp(bytes, kArenaAlignment);
  plan.reserved_bytes =
      plan.arena_bytes + clustered_layers * spec.max_tokens * IndexBytesPerToken(spec);
  return plan;
}

absl::StatusOr<std::unique_ptr<SequenceMemory>> SequenceMemory::Create(
    std::shared_ptr<BlockPool> pool, const TenantId& tenant, const SequenceSpec& spec,
    uint32_t build_threads, std::string label) {
  const MemoryPlan plan = PlanMemory(spec, build_threads);
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena,
                          pool->CreateArena(tenant, plan.arena_bytes, plan.reserved_bytes, label));
  return std::unique_ptr<SequenceMemory>(
      new SequenceMemory(std::move(pool), std::move(arena), spec, plan, std::move(label)));
}

SequenceMemory::SequenceMemory(std::shared_ptr<BlockPool> pool, std::shared_ptr<Arena> arena,
                               const SequenceSpec& spec, const MemoryPlan& plan, std::string label)
    : pool_(std::move(pool)),
      tenant_(arena->tenant()),
      label_(std::move(label)),
      layer_count_(spec.shape.layer_count),
      token_bytes_(spec.shape.token_bytes()),
      frame_tokens_(plan.frame_tokens),
      stretch_tokens_(spec.index.segment_tokens),
      arena_(std::move(arena)) {}

absl::StatusOr<RowChunk> SequenceMemory::AllocateSink() {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckOpen());
  WAVEKV_ASSIGN_OR_RETURN(RowMemory memory,
                          AllocateSmall(kSinkTokens, kSinksPerLayer * layer_count_, &sinks_));
  return RowChunk{memory.base, 0, kSinkTokens, std::move(memory.owner)};
}

absl::StatusOr<RowChunk> SequenceMemory::AllocateChunk(uint32_t layer, uint64_t first_position) {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckOpen());
  const FrameKey key = {layer, first_position / stretch_tokens_, Content::kRows};
  std::shared_ptr<MemoryFrame> frame = KnownFrame(key);
  if (frame == nullptr) {
    absl::StatusOr<std::shared_ptr<Run>> run =
        AllocateReserved(frame_tokens_ * token_bytes_, Run::Place::kPrivate);
    if (run.ok()) frame = AddFrame(key, *std::move(run));
  }
  std::optional<RowMemory> memory;
  if (frame != nullptr) memory = frame->Take({first_position, first_position + kChunkTokens});
  if (!memory.has_value()) {
    WAVEKV_ASSIGN_OR_RETURN(
        memory, AllocateSmall(kChunkTokens, kSpareChunksPerLayer * layer_count_, &spare_chunks_));
  }
  return RowChunk{memory->base, first_position, kChunkTokens, std::move(memory->owner)};
}

absl::StatusOr<RowMemory> SequenceMemory::AllocateSegment(uint32_t layer, const TokenRange& range) {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckOpen());
  const FrameKey key = {layer, range.begin / stretch_tokens_, Content::kSegments};
  if (const std::shared_ptr<MemoryFrame> frame = KnownFrame(key)) {
    if (std::optional<RowMemory> memory = frame->Take(range)) return *std::move(memory);
  }
  // The first of its stretch, or one that replaces others, which keep their frame until they go.
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Run> run, Allocate(frame_tokens_ * token_bytes_));
  return *AddFrame(key, std::move(run))->Take(range);
}

void SequenceMemory::Close() {
  // The last owner of an arena unmaps it: without the lock.
  std::shared_ptr<Arena> arena;
  std::shared_ptr<MemoryFrame> sinks;
  std::shared_ptr<MemoryFrame> spare_chunks;
  MutexLock lock(&mutex_);
  frames_.clear();
  sinks.swap(sinks_);
  spare_chunks.swap(spare_chunks_);
  overflow_.clear();
  arena.swap(arena_);
}

uint64_t SequenceMemory::reserved_bytes() const {
  MutexLock lock(&mutex_);
  uint64_t bytes = arena_ == nullptr ? 0 : arena_->reserved_bytes();
  for (const std::weak_ptr<Arena>& overflow : overflow_) {
    if (const std::shared_ptr<Arena> arena = overflow.lock()) bytes += arena->reserved_bytes();
  }
  return bytes;
}

std::shared_ptr<const Arena> SequenceMemory::arena() const {
  MutexLock lock(&mutex_);
  return arena_;
}

absl::Status SequenceMemory::CheckOpen() const {
  if (arena_ != nullptr) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat(label_, " was dropped"));
}

absl::StatusOr<std::shared_ptr<Run>> SequenceMemory::AllocateReserved(uint64_t bytes,
                                                                      Run::Place place) {
  const auto allocate = [&](Arena* arena) {
    return place == Run::Place::kPrivate ? arena->AllocatePrivate(bytes) : arena->Allocate(bytes);
  };
  absl::StatusOr<std::shared_ptr<Run>> run = allocate(arena_.get());
  for (size_t i = 0; !run.ok() && i < overflow_.size(); ++i) {
    const std::shared_ptr<Arena> arena = overflow_[i].lock();
    if (arena != nullptr) run = allocate(arena.get());
  }
  return run;
}

absl::StatusOr<std::shared_ptr<Run>> SequenceMemory::Allocate(uint64_t bytes) {
  absl::StatusOr<std::shared_ptr<Run>> run = AllocateReserved(bytes, Run::Place::kFile);
  if (run.ok()) return run;
  std::erase_if(overflow_, [](const std::weak_ptr<Arena>& arena) { return arena.expired(); });
  const uint64_t overflow_bytes =
      std::max(RoundUp(bytes, kRunAlignment), RoundUp(frame_tokens_ * token_bytes_, kRunAlignment));
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Arena> arena,
                          pool_->CreateArena(tenant_, overflow_bytes, overflow_bytes,
                                             absl::StrCat(label_, " overflow")));
  overflow_.push_back(arena);
  return arena->Allocate(bytes);
}

std::shared_ptr<MemoryFrame> SequenceMemory::KnownFrame(const FrameKey& key) {
  const auto known = frames_.find(key);
  return known == frames_.end() ? nullptr : known->second.lock();
}

std::shared_ptr<MemoryFrame> SequenceMemory::AddFrame(const FrameKey& key,
                                                      std::shared_ptr<Run> run) {
  std::erase_if(frames_, [](const auto& entry) { return entry.second.expired(); });
  auto frame = std::make_shared<MemoryFrame>(std::move(run), std::get<1>(key) * stretch_tokens_,
                                             frame_tokens_, token_bytes_);
  frames_[key] = frame;
  return frame;
}

absl::StatusOr<RowMemory> SequenceMemory::AllocateSmall(uint64_t tokens, uint64_t count,
                                                        std::shared_ptr<MemoryFrame>* pieces) {
  if (*pieces == nullptr) {
    WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Run> run, Allocate(count * tokens * token_bytes_));
    *pieces = std::make_shared<MemoryFrame>(std::move(run), 0, count * tokens, token_bytes_);
  }
  if (std::optional<RowMemory> memory = (*pieces)->TakeAny(tokens)) return *std::move(memory);
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Run> run, Allocate(tokens * token_bytes_));
  std::byte* const base = run->data();
  return RowMemory{base, std::move(run)};
}

}  // namespace wavekv
