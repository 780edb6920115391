#include "daemon/engine/engine.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/engine_impl.h"
#include "daemon/engine/query_step.h"
#include "daemon/engine/validation.h"
#include "storage/base/cpuset.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// A dropped sequence's build ends at the next KV head: a fraction of a second.
constexpr int64_t kWaitForDroppedMs = 2000;

absl::Status CheckOption(const char* name, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, " is ", value, ", expected ", low, " to ", high));
}

absl::Status ValidateOptions(const EngineOptions& options) {
  if (options.epoch == 0) {
    return absl::InvalidArgumentError("engine: epoch is 0, expected a number above 0");
  }
  if (options.build_queue_max == 0) {
    return absl::InvalidArgumentError("engine: build_queue_max is 0, expected a number above 0");
  }
  WAVEKV_RETURN_IF_ERROR(CheckOption("build_threads", options.build_threads, 0, kEngineThreadsMax));
  WAVEKV_RETURN_IF_ERROR(
      CheckOption("compute_threads", options.compute_threads, 0, kEngineThreadsMax));
  WAVEKV_RETURN_IF_ERROR(CheckOption("sequences_max", options.sequences_max, 1, kSequencesMax));
  WAVEKV_RETURN_IF_ERROR(CheckOption("tokens_max", options.tokens_max, 1, kTokensMax));
  WAVEKV_RETURN_IF_ERROR(CheckOption("recordings_max", options.recordings_max, 0, kRecordingsMax));
  WAVEKV_RETURN_IF_ERROR(CheckOption("recording_queue_bytes", options.recording_queue_bytes,
                                     kRecordingQueueBytesMin, kRecordingQueueBytesMax));
  return CheckOption("batch_max", options.batch_max, 1, kBatchMax);
}

// What was asked for, or one thread for each CPU that may be used.
uint32_t ThreadCount(uint32_t asked) {
  if (asked != 0) return asked;
  return std::clamp(static_cast<uint32_t>(UsableCpuCount()), 1u, kEngineThreadsMax);
}

}  // namespace

Engine::Impl::Impl(const EngineOptions& engine_options, uint32_t build_threads,
                   uint32_t compute_threads, std::shared_ptr<BlockPool> block_pool,
                   std::unique_ptr<ComputeBackend> compute_backend,
                   std::unique_ptr<Stager> wave_stager)
    : options(engine_options),
      build_thread_count(build_threads),
      clock(engine_options.clock == nullptr ? RealClock() : engine_options.clock),
      pool(std::move(block_pool)),
      backend(std::move(compute_backend)),
      stager(std::move(wave_stager)),
      registry(engine_options.sequences_max),
      recordings(engine_options.recordings_max),
      // The caller takes part.
      compute_pool(static_cast<int>(compute_threads) - 1, "wavekv-attend"),
      steps(std::chrono::milliseconds(engine_options.build_pause_ms_max)),
      builder({build_threads, engine_options.build_queue_max}, backend.get(), &steps, index_gauge) {
}

absl::StatusOr<Sequence::Use> Engine::Impl::Find(const TenantId& tenant, SequenceId id) const {
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Sequence> sequence, registry.Find(tenant, id));
  return Sequence::Use(std::move(sequence));
}

SequenceId Engine::Impl::NextId() {
  return SequenceId((uint64_t{options.epoch} << 32) | (last_id.fetch_add(1) + 1));
}

absl::StatusOr<std::shared_ptr<Sequence>> Engine::Impl::Make(const TenantId& tenant, ClientId owner,
                                                             const SequenceSpec& spec) {
  if (last_id.load() >= UINT32_MAX - 1) {
    return absl::ResourceExhaustedError(
        "this daemon has given out all its sequence ids; restart it");
  }
  if (spec.attach_wave_buffer && stager == nullptr) {
    return absl::FailedPreconditionError(
        "the sequence wants a wave buffer and this daemon has none; start wavebufferd and name "
        "its socket in --wave_buffer, or leave attach_wave_buffer out");
  }
  const SequenceId id = NextId();
  const std::string label =
      absl::StrCat("sequence ", id.value(), spec.label.empty() ? "" : " ", spec.label);
  // What is more than there will ever be is refused before anything is evicted for it.
  const bool possible =
      PlanMemory(spec, build_thread_count).reserved_bytes <= pool->Usage().bytes_max;
  bool waited = false;
  for (;;) {
    absl::StatusOr<std::unique_ptr<SequenceMemory>> memory =
        SequenceMemory::Create(pool, tenant, spec, build_thread_count, label);
    if (memory.ok()) {
      return std::make_shared<Sequence>(SequenceIdentity{id, tenant, spec}, owner,
                                        *std::move(memory), &builder, clock);
    }
    if (!absl::IsResourceExhausted(memory.status()) || !possible) return memory.status();
    // What was dropped a moment ago may still be with the builder.
    if (!waited && builder.WaitForDropped(kWaitForDroppedMs)) {
      waited = true;
      continue;
    }
    if (!EvictOne(tenant)) return memory.status();
    waited = false;
  }
}

absl::Status Engine::Impl::Admit(const std::shared_ptr<Sequence>& sequence) {
  const bool attach = sequence->spec().attach_wave_buffer;
  if (attach) {
    absl::Status attached = stager->AttachSequence(sequence->tenant(), sequence->id(),
                                                   sequence->shape(), sequence->spec().max_tokens);
    while (absl::IsResourceExhausted(attached) && EvictOne(sequence->tenant())) {
      attached = stager->AttachSequence(sequence->tenant(), sequence->id(), sequence->shape(),
                                        sequence->spec().max_tokens);
    }
    WAVEKV_RETURN_IF_ERROR(attached);
  }
  absl::Status added = registry.Add(sequence);
  while (absl::IsResourceExhausted(added) && EvictOne(sequence->tenant())) {
    added = registry.Add(sequence);
  }
  if (!added.ok() && attach) stager->DetachSequence(sequence->id());
  return added;
}

bool Engine::Impl::EvictOne(const TenantId& tenant) {
  const std::shared_ptr<Sequence> victim = registry.OldestEvictable(tenant);
  if (victim == nullptr) return false;
  Log(LogLevel::kInfo, "sequence_evicted",
      {{"tenant", tenant}, {"sequence", victim->id().value()}});
  victim->End();
  Forget(*victim);
  return true;
}

void Engine::Impl::Forget(const Sequence& sequence) {
  residents.Remove(sequence.id(), absl::NotFoundError("the sequence has ended"));
  const bool first = registry.Remove(sequence.id());
  if (first && sequence.spec().attach_wave_buffer) stager->DetachSequence(sequence.id());
}

void Engine::Impl::Count(const StepCounters& step) {
  MutexLock lock(&counters_mutex);
  counters += step;
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(const EngineOptions& options,
                                                       std::shared_ptr<BlockPool> pool,
                                                       std::unique_ptr<ComputeBackend> backend,
                                                       std::unique_ptr<Stager> stager) {
  WAVEKV_RETURN_IF_ERROR(ValidateOptions(options));
  if (pool == nullptr || backend == nullptr) {
    return absl::InvalidArgumentError("engine: expected a block pool and a compute backend");
  }
  return std::unique_ptr<Engine>(new Engine(std::make_unique<Impl>(
      options, ThreadCount(options.build_threads), ThreadCount(options.compute_threads),
      std::move(pool), std::move(backend), std::move(stager))));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Engine::~Engine() = default;

absl::StatusOr<SequenceStatus> Engine::CreateSequence(const TenantId& tenant, ClientId owner,
                                                      const SequenceSpec& spec) {
  WAVEKV_RETURN_IF_ERROR(ValidateSpec(spec, impl_->options.tokens_max));
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> sequence,
                          impl_->Make(tenant, owner, spec));
  WAVEKV_RETURN_IF_ERROR(impl_->Admit(sequence));
  return sequence->Status();
}

absl::StatusOr<InsertOutcome> Engine::Insert(const TenantId& tenant, const InsertChunk& chunk) {
  WAVEKV_ASSIGN_OR_RETURN(const Sequence::Use sequence, impl_->Find(tenant, chunk.sequence.id));
  WAVEKV_ASSIGN_OR_RETURN(const RowBatch batch, ReadInsertChunk(sequence->shape(), chunk));
  const Generation generation = chunk.sequence.generation;
  if (const auto attached = impl_->residents.Find(sequence->id())) {
    absl::StatusOr<InsertOutcome> outcome =
        attached->Insert(generation, batch, &impl_->compute_pool);
    impl_->residents.Notify();
    return outcome;
  }
  return sequence->Append(generation, batch, AppendMode::kInsert, &impl_->compute_pool);
}

absl::StatusOr<BuildProgress> Engine::BuildIndex(
    const TenantId& tenant, SequenceRef sequence,
    const std::function<bool(const BuildProgress&)>& progress) {
  WAVEKV_ASSIGN_OR_RETURN(const Sequence::Use found, impl_->Find(tenant, sequence.id));
  return found->BuildIndex(sequence.generation, progress);
}

absl::StatusOr<IndexPlan> Engine::PlanIndex(const TenantId& tenant, SequenceRef sequence,
                                            uint32_t layer, uint64_t token_count) const {
  WAVEKV_ASSIGN_OR_RETURN(const Sequence::Use found, impl_->Find(tenant, sequence.id));
  WAVEKV_RETURN_IF_ERROR(ValidateLayer(found->shape(), layer));
  return found->PlanIndex(sequence.generation, layer, token_count);
}

absl::StatusOr<LabelOutcome> Engine::GiveLabels(const TenantId& tenant, SequenceRef sequence,
                                                uint32_t layer,
                                                std::span<const LabelRange> segments) {
  WAVEKV_ASSIGN_OR_RETURN(const Sequence::Use found, impl_->Find(tenant, sequence.id));
  WAVEKV_RETURN_IF_ERROR(ValidateLayer(found->shape(), layer));
  WAVEKV_RETURN_IF_ERROR(ValidateLabelCount(found->spec(), segments.size()));
  std::vector<GivenLabels> labels;
  labels.reserve(segments.size());
  for (const LabelRange& segment : segments) {
    WAVEKV_ASSIGN_OR_RETURN(GivenLabels read, ReadLabels(found->spec(), segment));
    labels.push_back(std::move(read));
  }
  return found->GiveLabels(sequence.generation, layer, std::move(labels));
}

absl::StatusOr<QueryOutcome> Engine::Query(const TenantId& tenant, const LayerQuery& query,
                                           const QueryOptions& options) {
  const StepPriority::Step step(&impl_->steps);
  absl::StatusOr<QueryOutcome> outcome = RunQuery(impl_->Resources(), tenant, query, options);
  if (outcome.ok()) impl_->Count(outcome->counters);
  return outcome;
}

absl::StatusOr<EstimateOutcome> Engine::Estimate(const TenantId& tenant, const LayerQuery& query) {
  const StepPriority::Step step(&impl_->steps);
  return RunEstimate(impl_->Resources(), tenant, query);
}

absl::StatusOr<std::vector<AttendOutcome>> Engine::Attend(const TenantId& tenant,
                                                          std::span<const AttendStep> steps,
                                                          AnswerSink* sink) {
  if (steps.empty() || steps.size() > impl_->options.batch_max) {
    return absl::InvalidArgumentError(absl::StrCat("attend: the batch has ", steps.size(),
                                                   " items, expected 1 to ",
                                                   impl_->options.batch_max, " (--batch_max)"));
  }
  const StepPriority::Step step(&impl_->steps);
  std::vector<AttendOutcome> outcomes = RunAttendBatch(impl_->Resources(), tenant, steps, sink);
  StepCounters counters;
  for (const AttendOutcome& outcome : outcomes) {
    if (outcome.status.ok()) counters += outcome.counters;
  }
  impl_->Count(counters);
  return outcomes;
}

absl::StatusOr<SequenceStatus> Engine::ForkSequence(const TenantId& tenant, ClientId owner,
                                                    SequenceRef parent, uint64_t token_count,
                                                    uint64_t max_tokens, std::string label) {
  WAVEKV_ASSIGN_OR_RETURN(const Sequence::Use source, impl_->Find(tenant, parent.id));
  WAVEKV_ASSIGN_OR_RETURN(const ForkSource fork,
                          source->ReadForkSource(parent.generation, token_count));
  SequenceSpec spec = source->spec();
  if (max_tokens != 0) spec.max_tokens = max_tokens;
  spec.label = std::move(label);
  WAVEKV_RETURN_IF_ERROR(ValidateSpec(spec, impl_->options.tokens_max));
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> child, impl_->Make(tenant, owner, spec));
  WAVEKV_RETURN_IF_ERROR(child->Adopt(fork));
  WAVEKV_RETURN_IF_ERROR(impl_->Admit(child));
  return child->Status();
}

absl::StatusOr<SequenceStatus> Engine::TruncateSequence(const TenantId& tenant,
                                                        SequenceRef sequence,
                                                        uint64_t token_count) {
  WAVEKV_ASSIGN_OR_RETURN(const Sequence::Use found, impl_->Find(tenant, sequence.id));
  const auto attached = impl_->residents.Find(sequence.id);
  const absl::StatusOr<Generation> bumped =
      attached == nullptr ? found->Truncate(sequence.generation, token_count)
                          : attached->Truncate(sequence.generation, token_count);
  if (attached != nullptr) impl_->residents.Notify();
  WAVEKV_RETURN_IF_ERROR(bumped.status());
  return found->Status();
}

absl::Status Engine::DropSequence(const TenantId& tenant, SequenceRef sequence) {
  WAVEKV_ASSIGN_OR_RETURN(const Sequence::Use found, impl_->Find(tenant, sequence.id));
  WAVEKV_RETURN_IF_ERROR(found->CheckGeneration(sequence.generation));
  found->End();
  impl_->Forget(*found);
  return absl::OkStatus();
}

absl::Status Engine::Pin(const TenantId& tenant, SequenceRef sequence, bool pinned) {
  WAVEKV_ASSIGN_OR_RETURN(const Sequence::Use found, impl_->Find(tenant, sequence.id));
  WAVEKV_RETURN_IF_ERROR(found->CheckGeneration(sequence.generation));
  found->SetPinned(pinned);
  return absl::OkStatus();
}

absl::Status Engine::SetTtl(const TenantId& tenant, SequenceRef sequence, uint64_t ttl_ms) {
  WAVEKV_ASSIGN_OR_RETURN(const Sequence::Use found, impl_->Find(tenant, sequence.id));
  WAVEKV_RETURN_IF_ERROR(found->CheckGeneration(sequence.generation));
  found->SetTtl(ttl_ms);
  return absl::OkStatus();
}

uint32_t Engine::ReleaseOwner(ClientId owner) {
  if (owner == ClientId(0)) return 0;  // Nobody holds no lease.
  impl_->residents.CloseOf(owner, absl::UnavailableError("the lease of its client has ended"));
  uint32_t gone = 0;
  for (const auto& sequence : impl_->registry.List("", SequenceId(0), UINT32_MAX)) {
    if (sequence->ReleaseOwner(owner)) continue;
    impl_->Forget(*sequence);
    ++gone;
  }
  return gone;
}

void Engine::Reap() {
  for (const auto& sequence : impl_->registry.List("", SequenceId(0), UINT32_MAX)) {
    if (!sequence->EndIfExpired()) continue;
    Log(LogLevel::kInfo, "sequence_expired",
        {{"tenant", sequence->tenant()}, {"sequence", sequence->id().value()}});
    impl_->Forget(*sequence);
  }
}

EngineStats Engine::Stats() const {
  EngineStats stats;
  stats.pool = impl_->pool->Usage();
  stats.tenants = impl_->pool->TenantUsages();
  stats.sequences = impl_->registry.CountByTenant();
  stats.index_bytes = impl_->index_gauge->load();
  stats.build_queue = impl_->builder.queue_size();
  stats.builds_paused = impl_->steps.paused_count();
  const BuildCounters& builds = *impl_->builder.counters();
  stats.builds = {builds.segments_own, builds.segments_given, builds.labels_left_aside,
                  builds.labels_unused};
  stats.recordings = impl_->recordings.count();
  stats.recording_queued_bytes = impl_->recordings.queued_bytes();
  stats.residents = impl_->residents.Stats();
  stats.backend = impl_->backend->Caps();
  if (impl_->stager != nullptr) stats.wave_buffers = impl_->stager->Status();
  MutexLock lock(&impl_->counters_mutex);
  stats.counters = impl_->counters;
  return stats;
}

bool Engine::has_stager() const { return impl_->stager != nullptr; }

std::vector<SequenceStatus> Engine::ListSequences(const TenantId& tenant, SequenceId after,
                                                  uint32_t limit) const {
  std::vector<SequenceStatus> statuses;
  for (const auto& sequence : impl_->registry.List(tenant, after, limit)) {
    statuses.push_back(sequence->Status());
  }
  return statuses;
}

absl::StatusOr<SequenceStatus> Engine::GetSequence(const TenantId& tenant,
                                                   SequenceRef sequence) const {
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> found,
                          impl_->registry.Find(tenant, sequence.id));
  WAVEKV_RETURN_IF_ERROR(found->CheckGeneration(sequence.generation));
  return found->Status();
}

std::vector<WaveBufferAccess> Engine::WaveBuffers(const TenantId& tenant, int64_t client_uid) {
  if (impl_->stager == nullptr) return {};
  absl::StatusOr<WaveBufferAccess> access = impl_->stager->Access(tenant, client_uid);
  if (!access.ok()) {
    Log(LogLevel::kWarning, "wave_buffer_away", {{"tenant", tenant}, {"status", access.status()}});
    return {};
  }
  return {*std::move(access)};
}

}  // namespace wavekv
