// Decode steps before index building: the builder pauses while a step runs.
#pragma once

#include <chrono>
#include <cstdint>

#include "storage/base/mutex.h"

namespace wavekv {

// Thread-safe. Building is not kept waiting for ever: a pause has a longest time, so that a stream
// of steps slows building down, by a bounded factor, and never stops it.
class StepPriority {
 public:
  explicit StepPriority(std::chrono::milliseconds pause_max) : pause_max_(pause_max) {}

  // A step that runs, from construction to destruction.
  class Step {
   public:
    explicit Step(StepPriority* priority);
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    StepPriority* const priority_;
  };

  // Called by building work between pieces of a millisecond or so: returns when no step runs, at
  // the latest after pause_max.
  void LetStepsPass();

  // Threads that stand in LetStepsPass.
  uint64_t paused_count() const;

 private:
  const std::chrono::milliseconds pause_max_;
  mutable Mutex mutex_;
  CondVar no_steps_;
  uint64_t steps_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t paused_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace wavekv
