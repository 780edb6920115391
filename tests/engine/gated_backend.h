// The CPU backend with a gate before ClusterSegment, so that a test decides how far the builder
// comes, and one before AttendRows, so that it decides when a step ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "index/backend/compute_backend.h"
#include "storage/base/mutex.h"

namespace wavekv::testing {

// Shared by a test and the engine's backend. Thread-safe.
class BuildGate {
 public:
  // Lets `count` more calls of ClusterSegment (one per KV head) through.
  void Allow(uint64_t count);
  // Lets all calls through from now on.
  void Open() { Allow(uint64_t{1} << 40); }
  // While set, calls that come through fail.
  void Fail(bool fail);
  // Waits until a call stands at the gate; bounded.
  bool WaitForWaiter();
  // Waits until a call has come through; bounded.
  bool WaitForCall();
  uint64_t calls() const;

  // While set, steps stand before the attention over their steady zone.
  void HoldSteps(bool hold);
  // Waits until a step stands there; bounded.
  bool WaitForHeldStep();

  // For the backend: what ClusterSegment and AttendRows pass.
  absl::Status Enter();
  void EnterStep();

 private:
  // Waits until *count is above 0; bounded.
  bool WaitUntilAny(const uint64_t* count) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable Mutex mutex_;
  CondVar changed_;
  uint64_t allowed_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  bool fail_ ABSL_GUARDED_BY(mutex_) = false;
  bool hold_steps_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t held_steps_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The gate is opened before the engine is destroyed, or the destructor waits for ever.
std::unique_ptr<ComputeBackend> CreateGatedBackend(std::shared_ptr<BuildGate> gate);

}  // namespace wavekv::testing
