#include "daemon/engine/step_priority.h"

namespace wavekv {

StepPriority::Step::Step(StepPriority* priority) : priority_(priority) {
  MutexLock lock(&priority_->mutex_);
  ++priority_->steps_;
}

StepPriority::Step::~Step() {
  MutexLock lock(&priority_->mutex_);
  if (--priority_->steps_ == 0) priority_->no_steps_.NotifyAll();
}

void StepPriority::LetStepsPass() {
  MutexLock lock(&mutex_);
  if (steps_ == 0) return;
  ++paused_;
  const auto deadline = std::chrono::steady_clock::now() + pause_max_;
  while (steps_ != 0) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) break;
    no_steps_.WaitFor(&mutex_, left);
  }
  --paused_;
}

uint64_t StepPriority::paused_count() const {
  MutexLock lock(&mutex_);
  return paused_;
}

}  // namespace wavekv
