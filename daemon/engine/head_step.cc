#include "daemon/engine/head_step.h"

#include <limits>
#include <numeric>
#include <utility>

#include "storage/base/status_macros.h"

namespace wavekv {

PartialAttention EmptyAttention(uint32_t group_size, uint32_t value_dim) {
  return {std::vector<float>(size_t{group_size} * value_dim, 0.0f),
          std::vector<float>(group_size, -std::numeric_limits<float>::infinity())};
}

namespace {

// A budget that neither retrieves nor estimates: the steady zone alone, no cluster is looked at.
bool WantsNothing(const ZoneBudget& budget) {
  const bool counted = budget.kind == BudgetKind::kRatio || budget.kind == BudgetKind::kClusters;
  return counted && budget.value == 0 && budget.estimate_ratio == 0;
}

}  // namespace

HeadStep::HeadStep(ComputeBackend* backend, const LayerSnapshot& snapshot, uint32_t kv_head,
                   std::span<const float> queries)
    : backend_(backend),
      snapshot_(&snapshot),
      kv_head_(kv_head),
      index_(snapshot.version->Head(kv_head)),
      cluster_count_(ClusterCount(index_)) {
  const ModelShape& shape = *snapshot.shape;
  query_ = {queries,         shape.group_size(), shape.key_dim,
            shape.value_dim, shape.dtype,        shape.softmax_scale};
}

absl::Status HeadStep::AttendSteady() {
  const RowRuns rows = snapshot_->SteadyRuns(kv_head_);
  if (rows.empty()) return absl::OkStatus();
  return backend_->AttendRows(rows, query_, &steady_);
}

absl::Status HeadStep::PlanZones(const ZoneBudget& budget) {
  if (cluster_count_ == 0) return absl::OkStatus();
  if (WantsNothing(budget)) {
    zones_.ignored = cluster_count_;
    return absl::OkStatus();
  }
  const PartialAttention steady = Steady();
  WAVEKV_RETURN_IF_ERROR(backend_->RankClusters(index_, query_, steady.lse, &scores_));
  ranked_ = true;
  WAVEKV_ASSIGN_OR_RETURN(zones_,
                          backend_->SelectZones(index_, query_, scores_, steady.lse, budget));
  return absl::OkStatus();
}

void HeadStep::RetrieveAll() {
  zones_ = ZonePlan();
  zones_.retrieved.resize(cluster_count_);
  std::iota(zones_.retrieved.begin(), zones_.retrieved.end(), 0u);
}

void HeadStep::KeepRetrieved(uint32_t count) {
  if (count < zones_.retrieved.size()) MoveTailToEstimation(count, &zones_);
}

absl::Status HeadStep::AttendRetrieved() {
  if (zones_.retrieved.empty()) return absl::OkStatus();
  return backend_->AttendClusters(index_, zones_.retrieved, query_, &retrieved_);
}

absl::Status HeadStep::EstimateRest(bool bounds) {
  if (!zones_.estimated.empty()) {
    WAVEKV_RETURN_IF_ERROR(
        backend_->EstimateClusters(index_, zones_.estimated, query_, scores_, bounds, &estimated_));
  }
  if (zones_.sketched.empty()) return absl::OkStatus();
  EstimatedAttention sketched;
  WAVEKV_RETURN_IF_ERROR(
      backend_->SketchClusters(index_, zones_.sketched, query_, scores_, bounds, &sketched));
  if (zones_.estimated.empty()) {
    estimated_ = std::move(sketched);
  } else {
    MergeEstimated(sketched, &estimated_);
  }
  return absl::OkStatus();
}

PartialAttention HeadStep::Answer() const {
  PartialAttention answer = Steady();
  if (!retrieved_.lse.empty()) MergePartial(retrieved_, &answer);
  if (!estimated_.attention.lse.empty()) MergePartial(estimated_.attention, &answer);
  return answer;
}

EstimatedAttention HeadStep::Estimated() const {
  if (!estimated_.attention.lse.empty()) return estimated_;
  const PartialAttention nothing = OrEmpty(PartialAttention());
  return {nothing, nothing.lse, nothing.lse};
}

PartialAttention HeadStep::OrEmpty(const PartialAttention& part) const {
  return part.lse.empty() ? EmptyAttention(query_.group_size, query_.value_dim) : part;
}

StepCounters HeadStep::Counters() const {
  StepCounters counters;
  counters.steady_tokens = snapshot_->steady_tokens();
  counters.retrieved_clusters = zones_.retrieved.size();
  for (const uint32_t cluster : zones_.retrieved) {
    counters.retrieved_tokens += ClusterRows(index_, cluster).row_count;
  }
  counters.estimated_clusters = zones_.estimated.size() + zones_.sketched.size();
  counters.sketched_clusters = zones_.sketched.size();
  counters.ignored_clusters = zones_.ignored;
  counters.moved_to_estimation = zones_.moved_to_estimation;
  counters.error_budget_met = zones_.error_budget_met ? 1 : 0;
  counters.error_budget_capped = zones_.error_budget_capped ? 1 : 0;
  const uint64_t row_bytes = snapshot_->shape->key_bytes() + snapshot_->shape->value_bytes();
  counters.kv_bytes_read = (counters.steady_tokens + counters.retrieved_tokens) * row_bytes;
  if (ranked_) {
    for (const SegmentHead* segment : index_) {
      counters.kv_bytes_read += segment->rank_read_bytes();
    }
  }
  counters.kv_bytes_read += estimated_.bytes_read;
  counters.kv_bytes_full = snapshot_->token_count * row_bytes;
  return counters;
}

}  // namespace wavekv
