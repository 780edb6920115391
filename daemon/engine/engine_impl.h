// What the engine is made of. Private to engine*.cc.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "daemon/engine/attend_batch.h"
#include "daemon/engine/builder.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/layer_version.h"
#include "daemon/engine/recorder.h"
#include "daemon/engine/resident_sync.h"
#include "daemon/engine/sequence_registry.h"
#include "daemon/engine/step_priority.h"
#include "storage/base/mutex.h"
#include "storage/base/thread_pool.h"

namespace wavekv {

struct Engine::Impl {
  class Attaching;

  Impl(const EngineOptions& engine_options, uint32_t build_threads, uint32_t compute_threads,
       std::shared_ptr<BlockPool> block_pool, std::unique_ptr<ComputeBackend> compute_backend,
       std::unique_ptr<Stager> wave_stager);

  StepResources Resources() { return {backend.get(), stager.get(), &compute_pool, &registry}; }
  absl::StatusOr<Sequence::Use> Find(const TenantId& tenant, SequenceId id) const;
  SequenceId NextId();
  // A sequence with its memory, in no list yet. Evicts for it.
  absl::StatusOr<std::shared_ptr<Sequence>> Make(const TenantId& tenant, ClientId owner,
                                                 const SequenceSpec& spec);
  // Gives it its part of the wave buffer and lists it; evicts for it.
  absl::Status Admit(const std::shared_ptr<Sequence>& sequence);
  // Evicts the tenant's least recently used idle sequence. Returns false when there is none.
  bool EvictOne(const TenantId& tenant);
  // Forgets an ended sequence.
  void Forget(const Sequence& sequence);
  // The attachment of a sequence that BeginAttachment has let the client have.
  absl::StatusOr<std::shared_ptr<AttachedSequence>> Attach(
      const std::shared_ptr<Sequence>& sequence, ClientId client, const ResidentOptions& region);
  void Count(const StepCounters& step);

  const EngineOptions options;
  const uint32_t build_thread_count;
  const Clock* const clock;
  const std::shared_ptr<BlockPool> pool;
  const std::unique_ptr<ComputeBackend> backend;
  const std::unique_ptr<Stager> stager;
  const IndexGauge index_gauge = std::make_shared<std::atomic<uint64_t>>(0);
  std::atomic<uint64_t> last_id = 0;
  Mutex counters_mutex;
  StepCounters counters ABSL_GUARDED_BY(counters_mutex);
  SequenceRegistry registry;
  RecordingSet recordings;
  ThreadPool compute_pool;
  StepPriority steps;
  Builder builder;  // Its threads end before what they use.
  ResidentSync residents{
      [this] { return stager == nullptr ? 0 : stager->Sweep(); }};  // Last, as it schedules builds.
};

}  // namespace wavekv
