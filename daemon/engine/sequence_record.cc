// What a sequence tells its recordings, under its own lock, so that the order is the one in which
// its state changed.
#include <algorithm>
#include <chrono>
#include <utility>

#include "daemon/engine/recording.h"
#include "daemon/engine/sequence.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

uint64_t UnixNowMs() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                   std::chrono::system_clock::now().time_since_epoch())
                                   .count());
}

TraceSequence HeaderOf(const SequenceIdentity& identity) {
  const SequenceSpec& spec = identity.spec;
  TraceSequence header;
  header.shape = spec.shape;
  header.first_kv_head = spec.first_kv_head;
  header.total_kv_head_count = spec.total_kv_head_count;
  header.segment_tokens = spec.index.segment_tokens;
  header.small_segment_tokens = spec.index.small_segment_tokens;
  header.tokens_per_cluster = spec.index.tokens_per_cluster;
  header.kmeans_iterations = spec.index.kmeans_iterations;
  header.sketch = spec.index.sketch;
  header.budget = TraceBudgetOf(spec.index.budget);
  for (const auto& [layer, budget] : spec.index.layer_budgets) {
    header.layer_budgets.emplace_back(layer, TraceBudgetOf(budget));
  }
  header.dense_layers = spec.index.dense_layers;
  header.max_tokens = spec.max_tokens;
  header.label = spec.label;
  header.sequence_id = identity.id.value();
  header.began_unix_ms = UnixNowMs();
  header.daemon_version = WAVEKV_VERSION;
  return header;
}

}  // namespace

absl::StatusOr<TraceSequence> Sequence::StartRecording(Generation wanted,
                                                       std::shared_ptr<Recording> recording) {
  TraceSequence header = HeaderOf(identity_);
  MutexLock write(&write_mutex_);  // No rows are half in.
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckAlive(wanted));
  if (attached_) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id().value(),
                     " is attached to the wave buffer: its steps run on the device, where nobody "
                     "records them; detach it first"));
  }
  header.generation = generation_.value();
  header.built = decoding_;
  for (const uint32_t layer : recording->layers()) {
    const uint64_t token_count = layers_[layer].content.token_count;
    header.layers.push_back({layer, token_count});
    recording->AddRows({.layer = layer,
                        .origin = TraceRowsOrigin::kStored,
                        .generation = generation_,
                        .range = {0, token_count}});
  }
  recordings_.push_back(std::move(recording));
  recorded_.store(true, std::memory_order_relaxed);
  return header;
}

void Sequence::StopRecording(const Recording& recording) {
  MutexLock lock(&mutex_);
  std::erase_if(recordings_, [&](const auto& known) { return known.get() == &recording; });
  recorded_.store(!recordings_.empty(), std::memory_order_relaxed);
}

void Sequence::RecordStep(RecordedStep step) {
  step.at_us = Recording::NowUs();
  const auto shared = std::make_shared<const RecordedStep>(std::move(step));
  MutexLock lock(&mutex_);
  for (const auto& recording : recordings_) recording->AddStep(shared);
}

void Sequence::RecordRowsLocked(uint32_t layer, AppendMode mode, const TokenRange& range) {
  for (const auto& recording : recordings_) {
    recording->AddRows({.layer = layer,
                        .origin = mode == AppendMode::kDecode ? TraceRowsOrigin::kAppend
                                                              : TraceRowsOrigin::kInsert,
                        .generation = generation_,
                        .range = range});
  }
}

void Sequence::RecordBuildLocked() {
  for (const auto& recording : recordings_) recording->AddBuild(generation_);
}

void Sequence::RecordTruncateLocked(const std::vector<LayerSnapshot>& before,
                                    uint64_t token_count) {
  for (const auto& recording : recordings_) {
    recording->KeepRows(before);
    recording->AddTruncate(generation_, token_count);
  }
}

void Sequence::EndRecordingsLocked() {
  if (recordings_.empty()) return;
  std::vector<LayerSnapshot> snapshots;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    snapshots.push_back(SnapshotLocked(layer));
  }
  for (const auto& recording : recordings_) {
    recording->KeepRows(snapshots);
    recording->Finish(TraceEndReason::kDropped);
  }
  recordings_.clear();
  recorded_.store(false, std::memory_order_relaxed);
}

}  // namespace wavekv
