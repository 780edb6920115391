// The attached sequences, and the thread that keeps them and their regions in step.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/attached_sequence.h"
#include "daemon/engine/resident_terms.h"
#include "storage/base/ids.h"
#include "storage/base/latency_histogram.h"
#include "storage/base/mutex.h"

namespace wavekv {

// Looks at every attached sequence about once a millisecond while steps run or somebody waits, less
// and less often while nothing moves, and not at all when none is attached. Thread-safe.
class ResidentSync {
 public:
  // `sweep` gives back what closed attachments held and no step can touch any more, and returns how
  // many still hold something; it is called about once a second until none does.
  explicit ResidentSync(std::function<size_t()> sweep);
  ~ResidentSync();  // Closes all. No call may be running.
  ResidentSync(const ResidentSync&) = delete;
  ResidentSync& operator=(const ResidentSync&) = delete;

  // In place of an earlier attachment of the sequence, which is closed.
  void Add(std::shared_ptr<AttachedSequence> attached);
  // The sequence's last attachment, closed ones too; null when it never had one.
  std::shared_ptr<AttachedSequence> Find(SequenceId id) const;
  // The sequence is gone: its attachment is closed and forgotten.
  void Remove(SequenceId id, const absl::Status& why);
  // Closes those of a client.
  void CloseOf(ClientId client, const absl::Status& why);

  // The attachment's state as soon as it is closed or its steady_first is above `above`, or after
  // `timeout` whatever it is.
  ResidentState Wait(const AttachedSequence& attached, uint64_t above,
                     std::chrono::milliseconds timeout);

  // An attachment was closed or written: whoever waits looks again.
  void Notify();
  ResidentStats Stats() const;

 private:
  using Attachments = std::map<SequenceId, std::shared_ptr<AttachedSequence>>;
  void Run();
  std::vector<std::shared_ptr<AttachedSequence>> OpenLocked() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Closes it, and keeps its counters for the sum.
  void Retire(const std::shared_ptr<AttachedSequence>& attached, const absl::Status& why);

  mutable Mutex mutex_;
  CondVar wake_;   // The thread: there is something to do.
  CondVar moved_;  // Who waits: something may have changed.
  Attachments attachments_ ABSL_GUARDED_BY(mutex_);
  ResidentCounters retired_ ABSL_GUARDED_BY(mutex_);  // Of forgotten ones.
  uint32_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool sweep_due_ ABSL_GUARDED_BY(mutex_) = false;  // Something was attached since the last one.
  const std::function<size_t()> sweep_;
  LatencyHistogram rounds_;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);  // From the first attachment on.
};

}  // namespace wavekv
