// The engine: sequences of a host's tenants, and the story of each operation on them.
//
// A library without gRPC and without CUDA: the daemon serves it, and a process can embed it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/recorder.h"
#include "daemon/engine/resident_terms.h"
#include "daemon/engine/types.h"
#include "index/backend/compute_backend.h"
#include "index/backend/stager.h"
#include "storage/base/clock.h"
#include "storage/block_pool.h"

namespace wavekv {

// The most that each option may say.
inline constexpr uint32_t kEngineThreadsMax = 1024;
inline constexpr uint32_t kSequencesMax = 1u << 20;
inline constexpr uint32_t kBatchMax = 1u << 16;
inline constexpr uint32_t kRecordingsMax = 64;
inline constexpr uint64_t kRecordingQueueBytesMin = 1ull << 20;
inline constexpr uint64_t kRecordingQueueBytesMax = 1ull << 40;

struct EngineOptions {
  uint32_t epoch = 0;             // Upper half of every sequence id; not 0.
  uint32_t build_threads = 0;     // 0: from the cpuset, at least 1.
  uint32_t compute_threads = 0;   // 0: from the cpuset. Attention of one call is spread over them.
  uint32_t sequences_max = 4096;  // Per tenant.
  uint64_t tokens_max = 1ull << 24;  // Per sequence; at most kTokensMax.
  uint32_t batch_max = 256;          // Items of one Attend.
  uint64_t build_queue_max = 1u << 16;
  uint32_t recordings_max = 4;                   // Recorders at a time; 0: none.
  uint64_t recording_queue_bytes = 64ull << 20;  // Of each, reserved in the pool.
  // Longest time that a piece of building, about a millisecond of work, waits for steps to end.
  uint32_t build_pause_ms_max = 5;
  const Clock* clock = nullptr;  // Outlives the engine; null: RealClock().
};

// Since start.
struct BuildStats {
  uint64_t segments_own = 0;       // Segments published: by the daemon's k-means,
  uint64_t segments_given = 0;     // or from given labels.
  uint64_t labels_left_aside = 0;  // Labels of segments that were not kept.
  uint64_t labels_unused = 0;      // Kept ones of which no published segment is.
};

struct EngineStats {
  PoolUsage pool;
  std::vector<TenantUsage> tenants;
  std::vector<std::pair<TenantId, uint32_t>> sequences;  // Count per tenant.
  uint64_t index_bytes = 0;
  StepCounters counters;  // Since start.
  uint64_t build_queue = 0;
  uint64_t builds_paused = 0;  // Threads that wait for steps to end.
  BuildStats builds;
  uint32_t recordings = 0;
  uint64_t recording_queued_bytes = 0;  // Of all of them.
  ResidentStats residents;
  BackendCaps backend;
  std::vector<WaveBufferStatus> wave_buffers;
};

struct BuildProgress {
  uint64_t tokens_done = 0;
  uint64_t tokens_total = 0;
  bool done = false;
  Generation generation;
  uint64_t version = 0;
};

// Thread-safe. Every call names the tenant; a sequence of another tenant is NotFound, like one
// that never was. A stale generation is FailedPrecondition naming both. Calls work in the caller's
// thread; BuildIndex waits for background threads.
class Engine {
 public:
  // InvalidArgument names the option, what was found and what is allowed.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      const EngineOptions& options, std::shared_ptr<BlockPool> pool,
      std::unique_ptr<ComputeBackend> backend,
      std::unique_ptr<Stager> stager);  // May be null.
  ~Engine();  // Cancels and joins background work. No call may be running.

  // Whether it was made with a stager.
  bool has_stager() const;

  // Reserves memory for max_tokens or refuses with ResourceExhausted (after evicting idle
  // sequences that outlived their owner and are not pinned).
  absl::StatusOr<SequenceStatus> CreateSequence(const TenantId& tenant, ClientId owner,
                                                const SequenceSpec& spec);

  // All of the chunk or nothing. Same range and bytes: no-op. Same range, other bytes: Aborted
  // naming the first position that differs. Gap: FailedPrecondition naming the expected position.
  // NaN or infinity: InvalidArgument naming layer, position and head.
  absl::StatusOr<InsertOutcome> Insert(const TenantId& tenant, const InsertChunk& chunk);

  // Cuts and clusters what is not yet and waits for it. `progress` is called from this thread and
  // returns false to stop waiting (Cancelled; the build itself goes on).
  absl::StatusOr<BuildProgress> BuildIndex(
      const TenantId& tenant, SequenceRef sequence,
      const std::function<bool(const BuildProgress&)>& progress);

  // Where the index of a layer will be cut once it holds token_count tokens (0: those it holds) and
  // BuildIndex has come, as far as it is not planned yet. InvalidArgument: it holds more, or cannot
  // hold as many.
  absl::StatusOr<IndexPlan> PlanIndex(const TenantId& tenant, SequenceRef sequence, uint32_t layer,
                                      uint64_t token_count) const;
  // Labels in place of k-means, for cuts of exactly their ranges that are not planned yet; of other
  // ranges they are not kept. InvalidArgument, and nothing changes: one of them has another length
  // than KV heads times tokens, a label that is no cluster, or positions beyond max_tokens.
  absl::StatusOr<LabelOutcome> GiveLabels(const TenantId& tenant, SequenceRef sequence,
                                          uint32_t layer, std::span<const LabelRange> segments);

  // Ranks the clusters for the layer's query heads, plans the zones and, where the sequence has a
  // wave buffer, stages the rows of the steady and retrieval zones there. What does not fit is
  // estimated and counted. Unavailable: the wave buffer is away.
  absl::StatusOr<QueryOutcome> Query(const TenantId& tenant, const LayerQuery& query,
                                     const QueryOptions& options);
  // The estimation zone alone, with bounds of its mass.
  absl::StatusOr<EstimateOutcome> Estimate(const TenantId& tenant, const LayerQuery& query);
  // One outcome per step, in order; a failed one does not fail the others. Answers go to `sink`, if
  // there is one, and into the outcomes else. InvalidArgument for the whole call: an empty batch,
  // one over batch_max.
  absl::StatusOr<std::vector<AttendOutcome>> Attend(const TenantId& tenant,
                                                    std::span<const AttendStep> steps,
                                                    AnswerSink* sink = nullptr);

  // token_count 0: all. max_tokens 0: the parent's.
  absl::StatusOr<SequenceStatus> ForkSequence(const TenantId& tenant, ClientId owner,
                                              SequenceRef parent, uint64_t token_count,
                                              uint64_t max_tokens, std::string label);
  // Keeps the first token_count tokens of every layer and bumps the generation.
  absl::StatusOr<SequenceStatus> TruncateSequence(const TenantId& tenant, SequenceRef sequence,
                                                  uint64_t token_count);
  // Every later call is NotFound; running ones finish, and memory goes with the last of them.
  absl::Status DropSequence(const TenantId& tenant, SequenceRef sequence);
  // A pinned sequence outlives its owner's lease and its TTL, and is never evicted.
  absl::Status Pin(const TenantId& tenant, SequenceRef sequence, bool pinned);
  // With a TTL it outlives its owner's lease, until that long after its last use; 0: none.
  absl::Status SetTtl(const TenantId& tenant, SequenceRef sequence, uint64_t ttl_ms);

  // Begins to record a sequence: what some of its layers hold now, then what happens to them, by
  // whichever way it comes. It holds up no step, keeps the sequence from nothing, and ends with it.
  // ResourceExhausted: there are recordings_max recorders, or the tenant has no room for the queue.
  absl::StatusOr<std::unique_ptr<Recorder>> Record(const TenantId& tenant, SequenceRef sequence,
                                                   const RecordingOptions& options);

  // Lets `client`, which owns the sequence, attend over it on the device itself: shows it in a
  // region of the tenant's wave buffer and keeps both in step, until the client detaches it, the
  // sequence ends, the client's lease or process does, or the wave buffer is lost. What steps
  // append there is stored as if it had been inserted; meanwhile nothing else appends, but for
  // Insert, which like TruncateSequence takes that no step is under way. FailedPrecondition names
  // what the sequence or this daemon lacks, and the cure. Aborted: it is attached, unless by
  // `client` itself and no process has come for it, or that is dead: then anew. InvalidArgument:
  // its shape or an option is none of a step on a GPU. ResourceExhausted: the buffer has no room.
  absl::StatusOr<ResidentGrant> AttachResident(const TenantId& tenant, ClientId client,
                                               int64_t client_uid, SequenceRef sequence,
                                               const ResidentOptions& region);
  // How the attachment is doing, once it has ended or shows every position up to
  // `steady_first_above` clustered, or after `wait`. FailedPrecondition: there never was one.
  absl::StatusOr<ResidentState> ResidentStatus(const TenantId& tenant, SequenceRef sequence,
                                               uint64_t steady_first_above,
                                               std::chrono::milliseconds wait);
  // Stores what steps have appended and ends the attachment. No step may begin any more; the region
  // is used anew once those under way have completed. FailedPrecondition: it is not attached.
  // Aborted: by another client. An error of storing is returned, and it is detached all the same.
  absl::StatusOr<ResidentState> DetachResident(const TenantId& tenant, ClientId client,
                                               SequenceRef sequence);

  // The owner's lease ended: its sequences go, but for pinned ones and those with a TTL, which
  // become nobody's. Returns how many went.
  uint32_t ReleaseOwner(ClientId owner);
  // Drops what outlived its TTL. Called about once a second.
  void Reap();

  EngineStats Stats() const;
  // Sequences of `tenant` (all tenants when empty) with id > after, ascending, at most `limit`.
  std::vector<SequenceStatus> ListSequences(const TenantId& tenant, SequenceId after,
                                            uint32_t limit) const;
  // Its state of this moment, which costs no wait for running calls.
  absl::StatusOr<SequenceStatus> GetSequence(const TenantId& tenant, SequenceRef sequence) const;
  // What the index looks like, over the layers and KV heads asked for (unset: all of them).
  // InvalidArgument: there is no such layer or head.
  absl::StatusOr<IndexDescription> DescribeIndex(const TenantId& tenant, SequenceRef sequence,
                                                 std::optional<uint32_t> layer,
                                                 std::optional<uint32_t> kv_head) const;
  // The `top` clusters (0: 20) of one KV head as a step would rank and place them, with their true
  // mass. `queries` [group, key_dim] or [query_heads, key_dim]; empty shape: the last the layer has
  // seen, FailedPrecondition when there is none.
  absl::StatusOr<Explanation> Explain(const TenantId& tenant, const LayerQuery& query,
                                      uint32_t kv_head, uint32_t top) const;
  // Exact attention beside the approximation. `queries` [layers, query_heads, key_dim]; empty
  // shape: the last each layer has seen.
  absl::StatusOr<RecallSample> SampleRecall(const TenantId& tenant, SequenceRef sequence,
                                            std::span<const uint32_t> layers,
                                            const TensorView& queries,
                                            const std::optional<ZoneBudget>& budget) const;

  // The wave buffer of `tenant`, for a client with this uid; empty when there is none.
  std::vector<WaveBufferAccess> WaveBuffers(const TenantId& tenant, int64_t client_uid);

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace wavekv
