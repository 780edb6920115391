// How many calls run, so that a shutdown waits for them and for nothing else.
#pragma once

#include <chrono>
#include <cstdint>

#include "storage/base/mutex.h"

namespace wavekv {

// Thread-safe.
class CallTracker {
 public:
  // Counts one call while it lives. The tracker must outlive it.
  class Token {
   public:
    explicit Token(CallTracker* tracker);
    ~Token();
    Token(const Token&) = delete;
    Token& operator=(const Token&) = delete;

   private:
    CallTracker* const tracker_;
  };

  // False when calls still run after `timeout`.
  bool WaitIdle(std::chrono::milliseconds timeout);
  uint64_t running_count() const;

 private:
  mutable Mutex mutex_;
  CondVar idle_;
  uint64_t running_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace wavekv
