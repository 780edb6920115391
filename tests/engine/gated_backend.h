// The CPU backend with a gate before ClusterSegment, so that a test decides how far the builder
// comes.
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
  uint64_t calls() const;

  absl::Status Enter();

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  uint64_t allowed_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t calls_ ABSL_GUARDED_BY(mutex_) = 0;
  bool fail_ ABSL_GUARDED_BY(mutex_) = false;
};

// The gate is opened before the engine is destroyed, or the destructor waits for ever.
std::unique_ptr<ComputeBackend> CreateGatedBackend(std::shared_ptr<BuildGate> gate);

}  // namespace wavekv::testing
