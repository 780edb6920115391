#include "daemon/engine/recorder.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/recording.h"
#include "daemon/engine/sequence.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

TraceStep ToTrace(const RecordedStep& step, int64_t began_us) {
  TraceStep trace;
  trace.layer = step.layer;
  trace.verb = step.verb;
  trace.exact = step.exact;
  trace.generation = step.generation.value();
  trace.version = step.version;
  trace.token_count = step.token_count;
  trace.at_us = static_cast<uint64_t>(std::max<int64_t>(step.at_us - began_us, 0));
  trace.budget = TraceBudgetOf(step.budget);
  trace.queries.assign(step.queries.all().begin(), step.queries.all().end());
  trace.out = step.out;
  trace.lse = step.lse;
  return trace;
}

// Rows `range` of a layer, [tokens, kv_heads, dim].
void CopyRows(const LayerSnapshot& snapshot, const TokenRange& range, TraceRows* target) {
  const ModelShape& shape = *snapshot.shape;
  const size_t key_stride = shape.kv_head_count * shape.key_bytes();
  const size_t value_stride = shape.kv_head_count * shape.value_bytes();
  target->keys.resize(range.size() * key_stride);
  target->values.resize(range.size() * value_stride);
  for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
    std::byte* const keys = target->keys.data() + head * shape.key_bytes();
    std::byte* const values = target->values.data() + head * shape.value_bytes();
    snapshot.VisitRows(head, range,
                       [&](uint64_t position, const std::byte* key, const std::byte* value) {
                         const uint64_t token = position - range.begin;
                         std::memcpy(keys + token * key_stride, key, shape.key_bytes());
                         std::memcpy(values + token * value_stride, value, shape.value_bytes());
                       });
  }
}

}  // namespace

absl::Status RecordingSet::Add(const Recording* recording) {
  MutexLock lock(&mutex_);
  if (recordings_.size() >= recordings_max_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", recordings_.size(),
                     " recordings already, of --recordings_max = ", recordings_max_));
  }
  recordings_.insert(recording);
  return absl::OkStatus();
}

void RecordingSet::Remove(const Recording* recording) {
  MutexLock lock(&mutex_);
  recordings_.erase(recording);
}

uint32_t RecordingSet::count() const {
  MutexLock lock(&mutex_);
  return static_cast<uint32_t>(recordings_.size());
}

uint64_t RecordingSet::queued_bytes() const {
  MutexLock lock(&mutex_);
  uint64_t bytes = 0;
  for (const Recording* recording : recordings_) bytes += recording->queued_bytes();
  return bytes;
}

Recorder::Recorder(std::shared_ptr<Sequence> sequence, std::shared_ptr<Recording> recording,
                   TraceSequence header, std::shared_ptr<Arena> queue_memory,
                   uint64_t rows_bytes_max, RecordingSet* recordings)
    : sequence_(std::move(sequence)),
      recording_(std::move(recording)),
      header_(std::move(header)),
      queue_memory_(std::move(queue_memory)),
      rows_bytes_max_(rows_bytes_max),
      recordings_(recordings) {}

Recorder::~Recorder() {
  sequence_->StopRecording(*recording_);
  recordings_->Remove(recording_.get());
}

bool Recorder::ready() const { return recording_->ready(); }

void Recorder::Finish(TraceEndReason reason) { recording_->Finish(reason); }

void Recorder::Cancel() { recording_->Cancel(); }

absl::StatusOr<TraceRecord> Recorder::Next() {
  WAVEKV_ASSIGN_OR_RETURN(const RecordedEvent event, recording_->Take());
  struct {
    Recorder* recorder;
    absl::StatusOr<TraceRecord> operator()(const RecordedRows& rows) {
      return recorder->NextRows(rows);
    }
    absl::StatusOr<TraceRecord> operator()(const std::shared_ptr<const RecordedStep>& step) {
      return ToTrace(*step, recorder->recording_->began_us());
    }
    absl::StatusOr<TraceRecord> operator()(const TraceBuild& build) { return build; }
    absl::StatusOr<TraceRecord> operator()(const TraceTruncate& truncate) { return truncate; }
    absl::StatusOr<TraceRecord> operator()(const TraceEnd& end) { return end; }
  } convert{this};
  return std::visit(convert, event);
}

absl::StatusOr<TraceRecord> Recorder::NextRows(const RecordedRows& rows) {
  absl::StatusOr<LayerSnapshot> snapshot =
      rows.kept != nullptr ? *rows.kept : sequence_->Snapshot(rows.generation, rows.layer);
  // The sequence has given the rows up since we asked for them: now they are kept with the event.
  if (!snapshot.ok()) return Next();
  const uint64_t tokens_max =
      std::max<uint64_t>(rows_bytes_max_ / sequence_->shape().token_bytes(), 1);
  const uint64_t begin = rows.range.begin + rows_read_;
  const TokenRange piece = {begin, std::min(begin + tokens_max, rows.range.end)};
  TraceRows trace;
  trace.layer = rows.layer;
  trace.origin = rows.origin;
  trace.generation = rows.generation.value();
  trace.first_position = piece.begin;
  trace.token_count = piece.size();
  CopyRows(*snapshot, piece, &trace);
  rows_read_ += piece.size();
  if (piece.end == rows.range.end) {
    rows_read_ = 0;
    recording_->DropRows();
  }
  return trace;
}

}  // namespace wavekv
