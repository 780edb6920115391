// What is recorded of one sequence, on its way from the steps to the recorder: a bounded queue that
// never makes a step wait.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/cut_plan.h"
#include "daemon/engine/layer_snapshot.h"
#include "daemon/engine/types.h"
#include "index/zone/zone_plan.h"
#include "storage/base/mutex.h"
#include "storage/trace/trace_records.h"

namespace wavekv {

TraceBudget TraceBudgetOf(const ZoneBudget& budget);

// Rows that count from now on. They never change while the sequence holds them, so that only their
// place is queued; the recorder reads them when it comes to them.
struct RecordedRows {
  uint32_t layer = 0;
  TraceRowsOrigin origin = TraceRowsOrigin::kStored;
  Generation generation;
  TokenRange range;
  // Set once the sequence gives them up: by a truncate, or as it ends.
  std::shared_ptr<const LayerSnapshot> kept;
};

// A step that was answered.
struct RecordedStep {
  uint32_t layer = 0;
  TraceVerb verb = TraceVerb::kAttend;
  bool exact = false;
  Generation generation;
  uint64_t version = 0;
  uint64_t token_count = 0;
  int64_t at_us = 0;  // On Recording::NowUs.
  ZoneBudget budget;
  QueryVectors queries;
  std::vector<float> out;  // Of an Attend.
  std::vector<float> lse;
};

using RecordedEvent = std::variant<RecordedRows, std::shared_ptr<const RecordedStep>, TraceBuild,
                                   TraceTruncate, TraceEnd>;

// Thread-safe; calls out to nobody. The sequence writes, under its own lock, and one recorder
// reads. Once it has ended or failed, what is written is ignored.
class Recording {
 public:
  // `layers` ascending. `queue_bytes_max`: of the steps and places that wait.
  Recording(SequenceId id, std::vector<uint32_t> layers, uint64_t steps, uint64_t queue_bytes_max);

  // The sequence's. What does not fit fails the recording.
  void AddRows(RecordedRows rows);  // Of a layer that is not recorded: ignored.
  void AddStep(const std::shared_ptr<const RecordedStep>& step);  // Likewise.
  void AddBuild(Generation generation);
  void AddTruncate(Generation generation, uint64_t token_count);
  // Before the sequence gives up its rows: keeps those that wait to be read. `snapshots` [layers].
  void KeepRows(const std::vector<LayerSnapshot>& snapshots);

  // After what is queued comes the end. The first reason stands.
  void Finish(TraceEndReason reason);
  // Nobody reads any more: Take returns Cancelled at once.
  void Cancel();

  // Waits for the next event; the last is a TraceEnd. Rows stay the next event, so that KeepRows
  // reaches them, until they are dropped. ResourceExhausted: the queue overflowed.
  absl::StatusOr<RecordedEvent> Take();
  void DropRows();
  // Whether Take would return at once.
  bool ready() const;

  const std::vector<uint32_t>& layers() const { return layers_; }
  int64_t began_us() const { return began_us_; }
  // Microseconds of CLOCK_MONOTONIC.
  static int64_t NowUs();
  uint64_t queued_bytes() const;

 private:
  bool Records(uint32_t layer) const;
  void PushLocked(RecordedEvent event, uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishLocked(TraceEndReason reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  struct Queued {
    RecordedEvent event;
    uint64_t bytes = 0;
  };

  const SequenceId id_;
  const std::vector<uint32_t> layers_;
  const uint64_t steps_;
  const uint64_t queue_bytes_max_;
  const int64_t began_us_;

  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<Queued> queue_ ABSL_GUARDED_BY(mutex_);
  uint64_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, uint64_t> step_counts_ ABSL_GUARDED_BY(mutex_);  // [layers]
  uint64_t step_count_ ABSL_GUARDED_BY(mutex_) = 0;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // The end is queued.
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv
