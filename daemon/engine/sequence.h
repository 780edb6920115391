// One sequence: its layers' tokens and indexes, who owns it, and the locks around them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/build_queue.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/layer_content.h"
#include "daemon/engine/layer_snapshot.h"
#include "daemon/engine/segment_labels.h"
#include "daemon/engine/sequence_memory.h"
#include "daemon/engine/tensor_rows.h"
#include "daemon/engine/types.h"
#include "storage/base/clock.h"
#include "storage/base/mutex.h"
#include "storage/base/thread_pool.h"
#include "storage/trace/trace_records.h"

namespace wavekv {

class Builder;
class Recording;
struct RecordedStep;

// Who a sequence is and what it was made with; constant.
struct SequenceIdentity {
  SequenceId id;
  TenantId tenant;
  SequenceSpec spec;
};

// What the builder needs to run one job.
struct StartedJob {
  std::shared_ptr<BuildJob> job;
  LayerSnapshot snapshot;
};

// One moment of a parent.
struct ForkSource {
  uint64_t token_count = 0;
  bool decoding = false;
  std::vector<LayerSnapshot> layers;
  std::vector<PlannedRanges> planned;  // [layers] its segments, and those it has queued.
  std::vector<std::vector<std::shared_ptr<const SegmentLabels>>> queued;  // [layers] Of the latter.
  std::vector<HeldLabels> held;                                           // [layers]
};

// How an append may lie relative to the tokens that are there.
enum class AppendMode {
  kInsert,  // Any overlap whose bytes are the same.
  kDecode,  // At the token count, or a retry of the last token.
};

// Who writes: while a sequence is attached to a resident region, only its attachment may.
enum class Writer { kClient, kAttachment };

// Thread-safe. Writers (append, truncate, publication) are serialised by write_mutex_ and take
// mutex_ only to read and to swap state; rows are written with mutex_ free, before the token count
// that makes them visible. Readers take a snapshot under mutex_ and work without any lock.
class Sequence : public std::enable_shared_from_this<Sequence> {
 public:
  Sequence(SequenceIdentity identity, ClientId owner, std::unique_ptr<SequenceMemory> memory,
           Builder* builder, const Clock* clock);

  const SequenceId& id() const { return identity_.id; }
  const TenantId& tenant() const { return identity_.tenant; }
  const SequenceSpec& spec() const { return identity_.spec; }
  const ModelShape& shape() const { return identity_.spec.shape; }
  SequenceMemory* memory() const { return memory_.get(); }
  // The layer's budget where it has one, else the sequence's.
  const ZoneBudget& Budget(uint32_t layer) const;

  // Reads. FailedPrecondition for a stale generation, NotFound once ended.
  absl::StatusOr<LayerSnapshot> Snapshot(Generation wanted, uint32_t layer) const;
  absl::StatusOr<std::vector<LayerSnapshot>> SnapshotAll(Generation wanted) const;
  SequenceStatus Status() const;
  absl::Status CheckGeneration(Generation wanted) const;
  bool building() const;

  // Writes (sequence_write.cc). The generation must be named.
  // A large batch is copied by the pool, too, if there is one.
  // FailedPrecondition from a client: the sequence is attached.
  absl::StatusOr<InsertOutcome> Append(Generation generation, const RowBatch& batch,
                                       AppendMode mode, ThreadPool* pool,
                                       Writer writer = Writer::kClient);
  absl::StatusOr<Generation> Truncate(Generation generation, uint64_t token_count,
                                      Writer writer = Writer::kClient);
  // What a fork of the first token_count tokens (0: all) starts from. InvalidArgument when there
  // are fewer.
  absl::StatusOr<ForkSource> ReadForkSource(Generation wanted, uint64_t token_count) const;
  // Makes this fresh sequence hold the tokens of `source`, whose parent is kept meanwhile.
  absl::Status Adopt(const ForkSource& source);

  // Background builds (sequence_build.cc).
  // Plans BuildIndex's cuts and waits until they and all earlier ones are published. `progress` is
  // called without locks; Cancelled when it returns false, Aborted when a truncation or a drop
  // comes between, the job's own error when it failed.
  absl::StatusOr<BuildProgress> BuildIndex(
      Generation generation, const std::function<bool(const BuildProgress&)>& progress);
  // Where the index is cut once the layer holds token_count tokens (0: those it holds) and was
  // built, as far as it is not planned yet. InvalidArgument: it holds more, or cannot hold as many.
  absl::StatusOr<IndexPlan> PlanIndex(Generation wanted, uint32_t layer,
                                      uint64_t token_count) const;
  // Keeps those labels that a cut may fit, all of what PlanIndex names among them; returns how
  // many. They are of this sequence's shape.
  absl::StatusOr<LabelOutcome> GiveLabels(Generation generation, uint32_t layer,
                                          std::vector<GivenLabels> labels);
  // The next job of the layer; without one, the layer is no longer scheduled.
  absl::StatusOr<StartedJob> StartJob(uint32_t layer);
  // Publishes the segment, or notes why there is none. Returns whether the layer has more jobs; if
  // not, it is no longer scheduled.
  bool FinishJob(uint32_t layer, const BuildJob& job,
                 absl::StatusOr<std::shared_ptr<const Segment>> segment);
  // The builder's queue had no room: the layer is no longer scheduled.
  void Unschedule(uint32_t layer, const absl::Status& why);

  // Recording (sequence_record.cc).
  // From now on the recording is told what happens; it begins with what is stored. Returns what its
  // trace begins with.
  absl::StatusOr<TraceSequence> StartRecording(Generation wanted,
                                               std::shared_ptr<Recording> recording);
  void StopRecording(const Recording& recording);
  // Whether a step that was answered is to be told to RecordStep.
  bool recorded() const { return recorded_.load(std::memory_order_relaxed); }
  void RecordStep(RecordedStep step);

  // Attachment to a resident region (sequence_attach.cc).
  // From now on only the attachment of `client` writes. Aborted: there is one. FailedPrecondition,
  // with the cure: the client does not own the sequence; it has no index yet, or its layers differ
  // in their tokens, or more than `exact_max` of them are not clustered; it is recorded.
  absl::Status BeginAttachment(Generation wanted, ClientId client, uint64_t exact_max);
  void EndAttachment();

  // Life.
  class Use;
  void SetPinned(bool pinned);
  void SetTtl(uint64_t ttl_ms);
  // The owner's lease ended. Returns false when the sequence goes with it, and ends it.
  bool ReleaseOwner(ClientId owner);
  // Nobody's, not pinned and without a call in progress: may be evicted for others.
  bool Evictable() const;
  int64_t last_use_ms() const;
  // Ends it when its TTL has passed. Returns whether it did.
  bool EndIfExpired();
  // New calls are refused; builds are cancelled; memory goes back to the pool but for what running
  // calls hold.
  void End();
  bool ended() const;

  void AddCounters(const StepCounters& counters);
  void RememberQueries(uint32_t layer, QueryVectors queries);

 private:
  struct Layer {
    LayerContent content;
    std::shared_ptr<const LayerVersion> version;
    BuildQueue builds;
    HeldLabels labels;          // Of cuts that are not planned yet.
    bool scheduled = false;     // In the builder's hands.
    absl::Status build_status;  // Why the last job failed.
    bool asked_again = false;   // By a BuildIndex, since the running job began.
    QueryVectors last_queries;
  };

  // What an ended sequence held. Its memory is unmapped when it goes, which takes long: never under
  // a lock that others wait for.
  struct Remains {
    std::vector<LayerContent> contents;
    std::vector<std::shared_ptr<const LayerVersion>> versions;
    std::vector<HeldLabels> labels;
  };

  absl::Status CheckAlive(Generation wanted) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWrite(Generation generation, Writer writer) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckAttachable(ClientId client, uint64_t exact_max) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  LayerSnapshot SnapshotLocked(uint32_t layer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<const LayerVersion> EmptyVersion() const;
  uint64_t TokenCountLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  [[nodiscard]] Remains EndLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Status CheckPosition(const RowBatch& batch, uint32_t layer, uint64_t token_count,
                             AppendMode mode) const;
  absl::Status CheckSameRows(const RowBatch& batch, size_t layer_idx,
                             const LayerSnapshot& snapshot) const;
  // Writes what each layer does not have yet to its new content, which nobody sees.
  absl::Status WriteBatch(const RowBatch& batch, std::span<const LayerSnapshot> before,
                          std::span<const LayerContent> contents, ThreadPool* pool) const;
  // Queues a cut, with the labels that are held for it.
  static void PushCut(Layer& state, const TokenRange& range);
  // Queues what the rules cut at the layer's token count.
  void PlanAfterAppendLocked(uint32_t layer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PublishLocked(uint32_t layer, SegmentList segments) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Hands layers that have work and are not scheduled to the builder.
  void ScheduleBuilds() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<BuildProgress> ProgressLocked(Generation planned_at,
                                               const std::vector<uint64_t>& tickets,
                                               uint64_t tokens_total) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void RecordRowsLocked(uint32_t layer, AppendMode mode, const TokenRange& range)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RecordBuildLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The truncate has its generation, and nothing was taken away yet.
  void RecordTruncateLocked(const std::vector<LayerSnapshot>& before, uint64_t token_count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndRecordingsLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const SequenceIdentity identity_;
  const CutRules rules_;
  std::vector<bool> dense_;  // [layers]; constant after construction.
  const std::unique_ptr<SequenceMemory> memory_;
  Builder* const builder_;
  const Clock* const clock_;

  Mutex write_mutex_ ABSL_ACQUIRED_BEFORE(mutex_);
  mutable Mutex mutex_;
  CondVar build_changed_;
  std::vector<Layer> layers_ ABSL_GUARDED_BY(mutex_);
  Generation generation_ ABSL_GUARDED_BY(mutex_) = Generation(1);
  uint64_t version_ ABSL_GUARDED_BY(mutex_) = 0;
  bool decoding_ ABSL_GUARDED_BY(mutex_) = false;  // There was a BuildIndex.
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  ClientId owner_ ABSL_GUARDED_BY(mutex_);
  bool attached_ ABSL_GUARDED_BY(mutex_) = false;  // To a resident region.
  bool pinned_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t ttl_ms_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t last_use_ms_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t uses_ ABSL_GUARDED_BY(mutex_) = 0;  // Calls in progress.
  StepCounters counters_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Recording>> recordings_ ABSL_GUARDED_BY(mutex_);
  std::atomic<bool> recorded_{false};  // Whether there are any, for steps.
};

// A call in progress: the sequence does not expire during it, and idles from its end on.
class Sequence::Use {
 public:
  explicit Use(std::shared_ptr<Sequence> sequence);
  ~Use();
  Use(Use&& other) = default;
  Use& operator=(Use&&) = delete;

  Sequence* operator->() const { return sequence_.get(); }
  Sequence& operator*() const { return *sequence_; }

 private:
  std::shared_ptr<Sequence> sequence_;
};

}  // namespace wavekv
