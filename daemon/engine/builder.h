// Clusters segments in the background, behind everything else the machine does.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>

#include "absl/status/statusor.h"
#include "daemon/engine/layer_version.h"
#include "daemon/engine/segment_labels.h"
#include "daemon/engine/sequence.h"
#include "daemon/engine/step_priority.h"
#include "index/backend/compute_backend.h"
#include "storage/base/mutex.h"
#include "storage/base/thread_pool.h"

namespace wavekv {

struct BuilderOptions {
  uint32_t thread_count = 1;
  uint64_t queue_max = 1u << 16;  // Layers waiting.
};

// Thread-safe. Runs one job of a layer at a time, layers in turn.
class Builder {
 public:
  // `backend` and `steps` outlive the builder.
  Builder(const BuilderOptions& options, ComputeBackend* backend, StepPriority* steps,
          IndexGauge gauge);
  ~Builder();  // Gives up what runs at the next KV head.

  // Takes the layer's jobs until there are none. When the queue is full, the layer is handed back
  // with Unavailable: its tokens stay exact, and the next append or BuildIndex tries again.
  void Schedule(std::shared_ptr<Sequence> sequence, uint32_t layer);

  // Waits, up to timeout_ms, for the builds of dropped sequences that have not ended yet and hold
  // memory. Returns whether there was one.
  bool WaitForDropped(int64_t timeout_ms);

  uint64_t queue_size() const { return pool_.queue_size(); }
  const std::shared_ptr<BuildCounters>& counters() const { return counters_; }

 private:
  void RunLayer(const std::shared_ptr<Sequence>& sequence, uint32_t layer);
  bool BuildNext(const std::shared_ptr<Sequence>& sequence, uint32_t layer);
  // Memory for the job's segment. Waits a little where there is none: readers of a version that a
  // job before this one replaced may still hold its frame.
  absl::StatusOr<RowMemory> AllocateSegment(Sequence& sequence, uint32_t layer,
                                            const BuildJob& job);
  absl::StatusOr<std::shared_ptr<const Segment>> BuildSegment(Sequence& sequence, uint32_t layer,
                                                              const BuildJob& job,
                                                              const LayerSnapshot& snapshot);

  const uint64_t queue_max_;
  ComputeBackend* const backend_;
  StepPriority* const steps_;
  const IndexGauge gauge_;
  const std::shared_ptr<BuildCounters> counters_ = std::make_shared<BuildCounters>();
  std::atomic<uint64_t> next_uid_ = 1;
  std::atomic<bool> stopping_ = false;
  Mutex mutex_;
  CondVar build_ended_;
  std::multiset<const Sequence*> building_ ABSL_GUARDED_BY(mutex_);  // Their threads keep them.
  ThreadPool pool_;  // Last: its threads use the fields above.
};

}  // namespace wavekv
