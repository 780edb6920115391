// Which staged steps this process may still read, so that completed_step never names one too many.
// Internal to the SDK.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>

#include "absl/base/thread_annotations.h"
#include "storage/base/mutex.h"

namespace wavekv::client {

// Steps of one sequence are numbered by the daemon, in the order in which it serves them. A query
// under way will get a number above every step seen before it was sent, but an unknown one: until
// its reply is here nothing above that may be acknowledged. Thread-safe.
class StepLedger {
 public:
  struct Ticket {
    uint64_t key = 0;
    uint64_t completed_step = 0;  // To send with the query.
  };

  // Before a query is sent.
  Ticket Begin() {
    MutexLock lock(&mutex_);
    const uint64_t completed = Completed();
    const uint64_t key = ++last_key_;
    readers_.emplace(key, seen_);
    return {key, completed};
  }

  // The reply named its step; its rows are read until Finish.
  void Staged(const Ticket& ticket, uint64_t step) {
    MutexLock lock(&mutex_);
    seen_ = std::max(seen_, step);
    // Everything below a step that is being read may go.
    readers_[ticket.key] = step == 0 ? 0 : step - 1;
  }

  // The rows are no longer read, or the query failed.
  void Finish(const Ticket& ticket) {
    MutexLock lock(&mutex_);
    readers_.erase(ticket.key);
  }

 private:
  uint64_t Completed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    uint64_t completed = seen_;
    for (const auto& [key, floor] : readers_) completed = std::min(completed, floor);
    return completed;
  }

  Mutex mutex_;
  uint64_t seen_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_key_ ABSL_GUARDED_BY(mutex_) = 0;
  // Reader -> the highest step that may be recycled while it reads.
  std::map<uint64_t, uint64_t> readers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv::client
