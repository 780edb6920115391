// Background builds of a sequence: planning, publication, waiting.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/builder.h"
#include "daemon/engine/sequence.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// How often a waiting BuildIndex reports although nothing changed, so that its caller can leave.
constexpr std::chrono::milliseconds kProgressInterval(100);

// A segment of the job is in the index.
void CountPublished(const BuildJob& job, BuildCounters* counters) {
  if (job.labels == nullptr) {
    counters->segments_own.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  job.labels->NoteUsed();
  counters->segments_given.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

void Sequence::PushCut(Layer& state, const TokenRange& range) {
  state.builds.Push(range, state.labels.Take(range));
}

void Sequence::PlanAfterAppendLocked(uint32_t layer) {
  if (dense_[layer] || ended_) return;
  Layer& state = layers_[layer];
  const PlannedRanges planned = state.builds.Planned(state.version->Ranges());
  for (const TokenRange& range :
       CutsAfterAppend(rules_, decoding_, planned, state.content.token_count)) {
    PushCut(state, range);
    state.build_status = absl::OkStatus();
  }
}

void Sequence::PublishLocked(uint32_t layer, SegmentList segments) {
  Layer& state = layers_[layer];
  state.version =
      std::make_shared<const LayerVersion>(++version_, std::move(segments), shape().kv_head_count);
}

void Sequence::ScheduleBuilds() {
  std::vector<uint32_t> ready;
  {
    MutexLock lock(&mutex_);
    for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
      Layer& state = layers_[layer];
      if (state.scheduled || state.builds.idle() || !state.build_status.ok()) continue;
      state.scheduled = true;
      ready.push_back(layer);
    }
  }
  for (const uint32_t layer : ready) builder_->Schedule(shared_from_this(), layer);
}

void Sequence::Unschedule(uint32_t layer, const absl::Status& why) {
  MutexLock lock(&mutex_);
  layers_[layer].scheduled = false;
  layers_[layer].build_status = why;
  build_changed_.NotifyAll();
}

absl::StatusOr<IndexPlan> Sequence::PlanIndex(Generation wanted, uint32_t layer,
                                              uint64_t token_count) const {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckAlive(wanted));
  const Layer& state = layers_[layer];
  const uint64_t held = state.content.token_count;
  const uint64_t asked = token_count == 0 ? held : token_count;
  if (asked < held || asked > spec().max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sequence ", id().value(), ", layer ", layer, ": token_count is ", asked, ", expected ",
        held, " (what it holds) to ", spec().max_tokens, " (max_tokens)"));
  }
  IndexPlan plan{.generation = generation_, .segments = {}};
  if (dense_[layer]) return plan;
  const PlannedRanges planned = state.builds.Planned(state.version->Ranges());
  for (const TokenRange& range : CutsForBuild(rules_, planned, asked)) {
    const auto size = static_cast<uint32_t>(range.size());
    plan.segments.push_back(
        {range.begin, size, ClusterCountFor(size, spec().index.tokens_per_cluster)});
  }
  return plan;
}

absl::StatusOr<LabelOutcome> Sequence::GiveLabels(Generation generation, uint32_t layer,
                                                  std::vector<GivenLabels> labels) {
  MutexLock lock(&mutex_);
  // They change no token: an attachment does not mind.
  WAVEKV_RETURN_IF_ERROR(CheckWrite(generation, Writer::kAttachment));
  Layer& state = layers_[layer];
  LabelOutcome outcome{.generation = generation_};
  const std::shared_ptr<BuildCounters>& counters = builder_->counters();
  const PlannedRanges planned = state.builds.Planned(state.version->Ranges());
  for (GivenLabels& segment : labels) {
    if (dense_[layer] || !MayBeCut(rules_, planned, segment.range)) {
      counters->labels_left_aside.fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    state.labels.Put(std::make_shared<const SegmentLabels>(std::move(segment), counters));
    ++outcome.kept_count;
  }
  return outcome;
}

absl::StatusOr<StartedJob> Sequence::StartJob(uint32_t layer) {
  MutexLock lock(&mutex_);
  Layer& state = layers_[layer];
  std::shared_ptr<BuildJob> job = state.builds.Start();
  if (job == nullptr) {
    state.scheduled = false;
    return absl::NotFoundError("no job is waiting");
  }
  state.asked_again = false;
  return StartedJob{std::move(job), SnapshotLocked(layer)};
}

bool Sequence::FinishJob(uint32_t layer, const BuildJob& job,
                         absl::StatusOr<std::shared_ptr<const Segment>> segment) {
  MutexLock write(&write_mutex_);
  MutexLock lock(&mutex_);
  Layer& state = layers_[layer];
  // Truncation cancels under mutex_, so from here on the job's tokens are those it clustered.
  if (segment.ok() && !job.cancelled) {
    SegmentList segments = state.version->segments();
    while (!segments.empty() && segments.back()->range().begin >= job.range.begin) {
      segments.pop_back();
    }
    segments.push_back(*std::move(segment));
    PublishLocked(layer, std::move(segments));
    CountPublished(job, builder_->counters().get());
    const uint64_t clustered_end = state.version->clustered_end();
    auto chunks = std::make_shared<ChunkList>(*state.content.chunks);
    std::erase_if(*chunks,
                  [&](const RowChunk& chunk) { return chunk.end_position() <= clustered_end; });
    state.content.chunks = std::move(chunks);
    state.build_status = absl::OkStatus();
    state.builds.Finish(/*again=*/false);
  } else {
    if (!job.cancelled && !state.asked_again) state.build_status = segment.status();
    state.builds.Finish(/*again=*/true);
  }
  build_changed_.NotifyAll();
  const bool more = !state.builds.idle() && state.build_status.ok();
  if (!more) state.scheduled = false;
  return more;
}

absl::StatusOr<BuildProgress> Sequence::ProgressLocked(Generation planned_at,
                                                       const std::vector<uint64_t>& tickets,
                                                       uint64_t tokens_total) const {
  if (ended_) {
    return absl::AbortedError(
        absl::StrCat("sequence ", id().value(), " was dropped while its index was built"));
  }
  if (generation_ != planned_at) {
    return absl::AbortedError(absl::StrCat("sequence ", id().value(),
                                           " was truncated while its index was built: generation ",
                                           planned_at.value(), " became ", generation_.value()));
  }
  BuildProgress progress;
  progress.done = true;
  uint64_t pending = 0;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    const Layer& state = layers_[layer];
    if (state.builds.DoneUpTo(tickets[layer])) continue;
    if (!state.build_status.ok()) return state.build_status;
    progress.done = false;
    pending += state.builds.PendingTokens(tickets[layer]);
  }
  progress.tokens_total = tokens_total;
  progress.tokens_done = tokens_total - std::min(pending, tokens_total);
  progress.generation = generation_;
  progress.version = version_;
  return progress;
}

absl::StatusOr<BuildProgress> Sequence::BuildIndex(
    Generation generation, const std::function<bool(const BuildProgress&)>& progress) {
  std::vector<uint64_t> tickets;
  uint64_t tokens_total = 0;
  Generation planned_at;
  {
    MutexLock write(&write_mutex_);
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(CheckAlive(generation));
    planned_at = generation_;
    decoding_ = true;
    RecordBuildLocked();
    for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
      Layer& state = layers_[layer];
      if (!dense_[layer]) {
        const PlannedRanges planned = state.builds.Planned(state.version->Ranges());
        for (const TokenRange& range : CutsForBuild(rules_, planned, state.content.token_count)) {
          PushCut(state, range);
        }
      }
      // A failed job gets another try; so does one that runs now, should it fail.
      state.build_status = absl::OkStatus();
      state.asked_again = true;
      tickets.push_back(state.builds.last_ticket());
      tokens_total += state.builds.PendingTokens(tickets.back());
    }
  }
  ScheduleBuilds();
  for (;;) {
    BuildProgress now;
    {
      MutexLock lock(&mutex_);
      WAVEKV_ASSIGN_OR_RETURN(now, ProgressLocked(planned_at, tickets, tokens_total));
    }
    if (progress != nullptr && !progress(now)) {
      return absl::CancelledError(
          absl::StrCat("sequence ", id().value(), ": nobody waits for the index; it is built on"));
    }
    if (now.done) return now;
    MutexLock lock(&mutex_);
    const absl::StatusOr<BuildProgress> latest = ProgressLocked(planned_at, tickets, tokens_total);
    if (latest.ok() && !latest->done && latest->tokens_done == now.tokens_done) {
      build_changed_.WaitFor(&mutex_, kProgressInterval);
    }
  }
}

}  // namespace wavekv
