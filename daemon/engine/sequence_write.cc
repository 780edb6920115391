// What changes a sequence's tokens: append, truncate, fork.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/sequence.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Below this, waking a thread takes longer than the copying that it would take over.
constexpr uint64_t kSharedWriteBytes = 256 << 10;

}  // namespace

absl::Status Sequence::CheckPosition(const RowBatch& batch, uint32_t layer, uint64_t token_count,
                                     AppendMode mode) const {
  if (batch.range.end > spec().max_tokens) {
    return absl::ResourceExhaustedError(
        absl::StrCat("sequence ", id().value(), ": positions ", batch.range.begin, " to ",
                     batch.range.end - 1, " of layer ", layer, " pass its max_tokens of ",
                     spec().max_tokens, "; create or fork it with a larger max_tokens"));
  }
  if (batch.range.begin > token_count) {
    return absl::FailedPreconditionError(absl::StrCat("sequence ", id().value(), ", layer ", layer,
                                                      ": a gap, expected position ", token_count,
                                                      ", found ", batch.range.begin));
  }
  if (mode == AppendMode::kDecode && batch.range.end < token_count) {
    return absl::FailedPreconditionError(absl::StrCat(
        "sequence ", id().value(), ", layer ", layer, ": expected position ", token_count,
        " (or a retry of ", token_count - 1, "), found ", batch.range.begin));
  }
  return absl::OkStatus();
}

absl::Status Sequence::CheckSameRows(const RowBatch& batch, size_t layer_idx,
                                     const LayerSnapshot& snapshot) const {
  const TokenRange overlap = {batch.range.begin, std::min(batch.range.end, snapshot.token_count)};
  if (overlap.begin >= overlap.end) return absl::OkStatus();
  uint64_t differs_at = UINT64_MAX;
  uint32_t differs_head = 0;
  for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
    snapshot.VisitRows(
        head, overlap, [&](uint64_t position, const std::byte* key, const std::byte* value) {
          if (position >= differs_at) return;
          const uint64_t token = position - batch.range.begin;
          const bool same =
              std::memcmp(batch.keys.Row(layer_idx, token, head), key, shape().key_bytes()) == 0 &&
              std::memcmp(batch.values.Row(layer_idx, token, head), value, shape().value_bytes()) ==
                  0;
          if (same) return;
          differs_at = position;
          differs_head = head;
        });
  }
  if (differs_at == UINT64_MAX) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat(
      "sequence ", id().value(), ": layer ", batch.layers[layer_idx], ", position ", differs_at,
      ", KV head ", differs_head,
      " holds other bytes than the call brings; truncate before writing a position anew"));
}

absl::Status Sequence::WriteBatch(const RowBatch& batch, std::span<const LayerSnapshot> before,
                                  std::span<const LayerContent> contents, ThreadPool* pool) const {
  const size_t head_count = shape().kv_head_count;
  std::vector<absl::Status> statuses(batch.layers.size() * head_count);
  const auto write = [&](size_t part) {
    const size_t layer_idx = part / head_count;
    const TokenRange range = {std::max(batch.range.begin, before[layer_idx].token_count),
                              batch.range.end};
    statuses[part] =
        WriteHeadRows(shape(), batch, layer_idx, static_cast<uint32_t>(part % head_count), range,
                      contents[layer_idx]);
  };
  const uint64_t bytes = batch.layers.size() * batch.range.size() * shape().token_bytes();
  if (pool == nullptr || bytes < kSharedWriteBytes) {
    for (size_t part = 0; part < statuses.size(); ++part) write(part);
  } else {
    pool->ParallelFor(statuses.size(), write);
  }
  for (absl::Status& status : statuses) {
    if (!status.ok()) return std::move(status);
  }
  return absl::OkStatus();
}

absl::StatusOr<InsertOutcome> Sequence::Append(Generation generation, const RowBatch& batch,
                                               AppendMode mode, ThreadPool* pool, Writer writer) {
  MutexLock write(&write_mutex_);
  std::vector<LayerSnapshot> before;
  std::vector<LayerContent> contents;
  {
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(CheckWrite(generation, writer));
    for (const uint32_t layer : batch.layers) {
      before.push_back(SnapshotLocked(layer));
      contents.push_back(layers_[layer].content);
    }
  }
  for (size_t i = 0; i < batch.layers.size(); ++i) {
    WAVEKV_RETURN_IF_ERROR(CheckPosition(batch, batch.layers[i], before[i].token_count, mode));
  }
  for (size_t i = 0; i < batch.layers.size(); ++i) {
    WAVEKV_RETURN_IF_ERROR(CheckSameRows(batch, i, before[i]));
  }
  std::vector<LayerGrowth> growths;
  for (size_t i = 0; i < batch.layers.size(); ++i) {
    WAVEKV_ASSIGN_OR_RETURN(LayerGrowth growth, AllocateGrowth(contents[i], batch.layers[i],
                                                               batch.range.end, memory_.get()));
    growths.push_back(std::move(growth));
  }
  for (size_t i = 0; i < batch.layers.size(); ++i) {
    contents[i] = Grown(std::move(contents[i]), std::move(growths[i]), batch.range.end);
  }
  WAVEKV_RETURN_IF_ERROR(WriteBatch(batch, before, contents, pool));
  InsertOutcome outcome;
  {
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(CheckAlive(generation));  // Dropped meanwhile?
    for (size_t i = 0; i < batch.layers.size(); ++i) {
      RecordRowsLocked(batch.layers[i], mode, {before[i].token_count, contents[i].token_count});
      layers_[batch.layers[i]].content = std::move(contents[i]);
      PlanAfterAppendLocked(batch.layers[i]);
    }
    outcome = {generation_, TokenCountLocked()};
  }
  ScheduleBuilds();
  return outcome;
}

absl::StatusOr<Generation> Sequence::Truncate(Generation generation, uint64_t token_count,
                                              Writer writer) {
  MutexLock write(&write_mutex_);
  std::vector<LayerSnapshot> before;
  {
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(CheckWrite(generation, writer));
    if (token_count > TokenCountLocked()) {
      return absl::InvalidArgumentError(absl::StrCat("sequence ", id().value(), ": cannot keep ",
                                                     token_count, " tokens, it holds ",
                                                     TokenCountLocked()));
    }
    for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
      before.push_back(SnapshotLocked(layer));
    }
  }
  std::vector<LayerContent> contents;
  std::vector<SegmentList> kept(before.size());
  for (uint32_t layer = 0; layer < before.size(); ++layer) {
    const PlannedRanges ranges = before[layer].version->Ranges();
    const size_t kept_count = RangesKept(ranges, token_count);
    const SegmentList& segments = before[layer].version->segments();
    kept[layer].assign(segments.begin(), segments.begin() + static_cast<ptrdiff_t>(kept_count));
    WAVEKV_ASSIGN_OR_RETURN(LayerContent content,
                            FirstTokens(before[layer], layer, token_count,
                                        PlannedEnd(std::span(ranges).first(kept_count)),
                                        token_count < before[layer].token_count, memory_.get()));
    contents.push_back(std::move(content));
  }
  Generation bumped;
  {
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(CheckAlive(generation));  // Dropped meanwhile?
    bumped = generation_ = Generation(generation_.value() + 1);
    RecordTruncateLocked(before, token_count);
    for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
      Layer& state = layers_[layer];
      state.content = std::move(contents[layer]);
      state.builds.Truncate(token_count);
      state.labels.Truncate(token_count);
      if (kept[layer].size() < state.version->segments().size()) {
        PublishLocked(layer, std::move(kept[layer]));
      }
      PlanAfterAppendLocked(layer);
    }
    build_changed_.NotifyAll();
  }
  ScheduleBuilds();
  return bumped;
}

absl::StatusOr<ForkSource> Sequence::ReadForkSource(Generation wanted, uint64_t token_count) const {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckAlive(wanted));
  const uint64_t held = TokenCountLocked();
  if (token_count > held) {
    return absl::InvalidArgumentError(absl::StrCat("sequence ", id().value(), ": cannot fork ",
                                                   token_count, " tokens, it holds ", held));
  }
  ForkSource source;
  source.token_count = token_count == 0 ? held : token_count;
  source.decoding = decoding_;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    source.layers.push_back(SnapshotLocked(layer));
    source.planned.push_back(layers_[layer].builds.Planned(layers_[layer].version->Ranges()));
    source.queued.push_back(layers_[layer].builds.Labels());
    source.held.push_back(layers_[layer].labels);
  }
  return source;
}

absl::Status Sequence::Adopt(const ForkSource& source) {
  if (source.token_count > spec().max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("fork: max_tokens is ", spec().max_tokens,
                                                   ", expected at least the ", source.token_count,
                                                   " tokens it begins with"));
  }
  MutexLock write(&write_mutex_);
  std::vector<LayerContent> contents;
  std::vector<SegmentList> segments;
  for (uint32_t layer = 0; layer < source.layers.size(); ++layer) {
    const LayerSnapshot& parent = source.layers[layer];
    const PlannedRanges ranges = parent.version->Ranges();
    const size_t kept = RangesKept(ranges, source.token_count);
    segments.push_back(parent.version->segments());
    segments.back().resize(kept);
    WAVEKV_ASSIGN_OR_RETURN(
        LayerContent content,
        FirstTokens(parent, layer, source.token_count, PlannedEnd(std::span(ranges).first(kept)),
                    /*copy_partial=*/true, memory_.get()));
    contents.push_back(std::move(content));
  }
  {
    MutexLock lock(&mutex_);
    decoding_ = source.decoding;
    for (uint32_t layer = 0; layer < source.layers.size(); ++layer) {
      layers_[layer].content = std::move(contents[layer]);
      layers_[layer].last_queries = source.layers[layer].last_queries;
      if (!segments[layer].empty()) PublishLocked(layer, std::move(segments[layer]));
      // What the parent has planned, the child plans too: its cuts must not depend on how far the
      // parent's builds had come.
      const PlannedRanges published = layers_[layer].version->Ranges();
      const PlannedRanges& planned = source.planned[layer];
      for (size_t i = 0; i < RangesKept(planned, source.token_count); ++i) {
        if (std::find(published.begin(), published.end(), planned[i]) != published.end()) continue;
        const auto labels =
            std::find_if(source.queued[layer].begin(), source.queued[layer].end(),
                         [&](const auto& queued) { return queued->range() == planned[i]; });
        layers_[layer].builds.Push(planned[i],
                                   labels == source.queued[layer].end() ? nullptr : *labels);
      }
      layers_[layer].labels = source.held[layer];
      layers_[layer].labels.Truncate(source.token_count);
      PlanAfterAppendLocked(layer);
    }
  }
  ScheduleBuilds();
  return absl::OkStatus();
}

}  // namespace wavekv
