// One step over one layer: a snapshot, the queries, and a HeadStep for each KV head.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/head_step.h"
#include "daemon/engine/layer_snapshot.h"
#include "daemon/engine/recording.h"
#include "daemon/engine/types.h"
#include "index/backend/stager.h"
#include "storage/base/thread_pool.h"

namespace wavekv {

// Immovable: its heads borrow its snapshot and queries.
class LayerStep {
 public:
  // `queries` [query_heads, key_dim].
  LayerStep(ComputeBackend* backend, LayerSnapshot snapshot, QueryVectors queries,
            ZoneBudget budget);
  LayerStep(const LayerStep&) = delete;
  LayerStep& operator=(const LayerStep&) = delete;

  const LayerSnapshot& snapshot() const { return snapshot_; }
  const ZoneBudget& budget() const { return budget_; }
  uint32_t head_count() const { return static_cast<uint32_t>(heads_.size()); }
  HeadStep& head(uint32_t kv_head) { return heads_[kv_head]; }

  // The whole attention of one head: over its zones, or over every token exactly.
  absl::Status Attend(uint32_t kv_head, bool exact);
  // Ranks one head and chooses its zones, with the steady zone's mass where the budget needs it.
  absl::Status Plan(uint32_t kv_head);

  // About what a step over all heads reads.
  uint64_t WorkBytes(bool exact) const;
  // Sums over the heads.
  StepCounters Counters() const;
  // The estimation zone of all heads, with its counters.
  EstimateOutcome CollectEstimation() const;
  // The rows that each head wants in the wave buffer.
  std::vector<StageHead> StageHeads(bool with_steady) const;
  // What a recording is told of it, but for the answer.
  RecordedStep Recorded(uint32_t layer, TraceVerb verb) const;

 private:
  const LayerSnapshot snapshot_;
  const QueryVectors queries_;
  const ZoneBudget budget_;
  std::vector<HeadStep> heads_;  // As many from the start on.
};

// Runs fn for every KV head on the pool and the caller; the first head's error, by number, is
// returned.
absl::Status ForEachHead(ThreadPool* pool, uint32_t head_count,
                         const std::function<absl::Status(uint32_t)>& fn);

}  // namespace wavekv
