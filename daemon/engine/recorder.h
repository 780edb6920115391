// Recording a sequence into a trace, while it is used.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/mutex.h"
#include "storage/trace/trace_records.h"

namespace wavekv {

class Arena;
class Recording;
class Sequence;
struct RecordedRows;

struct RecordingOptions {
  std::vector<uint32_t> layers;          // Empty: all.
  uint64_t steps = 0;                    // Ends once each layer has had so many; 0: no such end.
  uint64_t rows_bytes_max = 4ull << 20;  // Of K and V in one record; one token at least.
};

// The recordings under way, and how many may be. Thread-safe.
class RecordingSet {
 public:
  explicit RecordingSet(uint32_t recordings_max) : recordings_max_(recordings_max) {}

  // ResourceExhausted: there are recordings_max.
  absl::Status Add(const Recording* recording);
  void Remove(const Recording* recording);

  uint32_t count() const;
  uint64_t queued_bytes() const;  // Of all of them.

 private:
  const uint32_t recordings_max_;
  mutable Mutex mutex_;
  std::set<const Recording*> recordings_ ABSL_GUARDED_BY(mutex_);
};

// One recording, as its reader sees it (docs/decisions/012-traces.md). Next is called from one
// thread; Finish and Cancel from any. Ends before the engine does.
class Recorder {
 public:
  // `queue_memory` is what the pool has reserved for the queue.
  Recorder(std::shared_ptr<Sequence> sequence, std::shared_ptr<Recording> recording,
           TraceSequence header, std::shared_ptr<Arena> queue_memory, uint64_t rows_bytes_max,
           RecordingSet* recordings);
  ~Recorder();  // The recording ends.
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  // What the trace begins with.
  const TraceSequence& sequence() const { return header_; }
  // Waits for the next record: what was stored when the recording began, then what happens. The
  // last is a TraceEnd, after which it must not be called. ResourceExhausted: the reader did not
  // keep up, and what happened since is lost; says at which step and how much was waiting.
  // Cancelled: by Cancel.
  absl::StatusOr<TraceRecord> Next();
  // Whether Next would return without waiting.
  bool ready() const;

  // Lets Next come to an end after what has happened until now. The first reason stands.
  void Finish(TraceEndReason reason);
  // Ends it at once: Next returns, with whatever there is or Cancelled.
  void Cancel();

 private:
  absl::StatusOr<TraceRecord> NextRows(const RecordedRows& rows);

  const std::shared_ptr<Sequence> sequence_;
  const std::shared_ptr<Recording> recording_;
  const TraceSequence header_;
  const std::shared_ptr<Arena> queue_memory_;
  const uint64_t rows_bytes_max_;
  RecordingSet* const recordings_;
  uint64_t rows_read_ = 0;  // Tokens of the rows that are next, read already.
};

}  // namespace wavekv
