// One step over one KV head: the parts of an attention over its zones, in the order they come.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/engine/layer_snapshot.h"
#include "daemon/engine/types.h"
#include "index/backend/compute_backend.h"

namespace wavekv {

// The attention over nothing: out = 0, lse = -inf.
PartialAttention EmptyAttention(uint32_t group_size, uint32_t value_dim);

// Borrows the backend, the snapshot and the queries. Not thread-safe; heads of one layer may run
// beside each other.
class HeadStep {
 public:
  // `queries` [group_size, key_dim] of the query heads that share `kv_head`.
  HeadStep(ComputeBackend* backend, const LayerSnapshot& snapshot, uint32_t kv_head,
           std::span<const float> queries);

  // Memory of parts that are no longer needed, for the steady zone's; it is gone until it is taken
  // back.
  void LendMemory(PartialAttention* memory) {
    memory->out.clear();
    memory->lse.clear();
    std::swap(steady_, *memory);
  }
  void TakeBackMemory(PartialAttention* memory) { std::swap(steady_, *memory); }
  // Exact attention over the steady zone.
  absl::Status AttendSteady();
  // Ranks the clusters and chooses the zones, weighed against the steady zone: AttendSteady comes
  // first.
  absl::Status PlanZones(const ZoneBudget& budget);
  // All clusters are retrieved: the exact answer.
  void RetrieveAll();
  // What did not fit elsewhere is estimated instead: keeps the first `count` retrieved clusters.
  void KeepRetrieved(uint32_t count);
  absl::Status AttendRetrieved();
  absl::Status EstimateRest(bool bounds);
  // Steady, retrieval and estimation zones merged, as far as they were computed.
  PartialAttention Answer() const;
  // The steady zone's part where it is the whole answer; null otherwise.
  const PartialAttention* OnlyPart() const {
    const bool only =
        !steady_.lse.empty() && retrieved_.lse.empty() && estimated_.attention.lse.empty();
    return only ? &steady_ : nullptr;
  }
  // The zones' parts; the attention over nothing where a zone is empty or was not asked for.
  PartialAttention Steady() const { return OrEmpty(steady_); }
  PartialAttention Retrieved() const { return OrEmpty(retrieved_); }
  EstimatedAttention Estimated() const;

  uint32_t kv_head() const { return kv_head_; }
  HeadIndex index() const { return index_; }
  const GroupQuery& query() const { return query_; }
  const ZonePlan& zones() const { return zones_; }
  const ClusterScores& scores() const { return scores_; }
  StepCounters Counters() const;

 private:
  PartialAttention OrEmpty(const PartialAttention& part) const;

  ComputeBackend* backend_;
  const LayerSnapshot* snapshot_;
  uint32_t kv_head_;
  HeadIndex index_;
  uint32_t cluster_count_;
  GroupQuery query_;
  bool ranked_ = false;
  ClusterScores scores_;
  ZonePlan zones_;
  // Without elements until computed: most steps leave some zone empty, and short ones are quick.
  PartialAttention steady_;
  PartialAttention retrieved_;
  EstimatedAttention estimated_;
};

}  // namespace wavekv
