#include "daemon/server/call_tracker.h"

#include <algorithm>

namespace wavekv {

CallTracker::Token::Token(CallTracker* tracker) : tracker_(tracker) {
  MutexLock lock(&tracker_->mutex_);
  ++tracker_->running_;
}

CallTracker::Token::~Token() {
  // Notified with the lock held: whoever waits may destroy the tracker as soon as it is idle.
  MutexLock lock(&tracker_->mutex_);
  if (--tracker_->running_ == 0) tracker_->idle_.NotifyAll();
}

bool CallTracker::WaitIdle(std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(&mutex_);
  while (running_ != 0) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) return false;
    idle_.WaitFor(&mutex_, left);
  }
  return true;
}

uint64_t CallTracker::running_count() const {
  MutexLock lock(&mutex_);
  return running_;
}

}  // namespace wavekv
