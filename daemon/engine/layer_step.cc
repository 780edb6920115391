#include "daemon/engine/layer_step.h"

#include <utility>

#include "storage/base/status_macros.h"

namespace wavekv {

LayerStep::LayerStep(ComputeBackend* backend, LayerSnapshot snapshot, QueryVectors queries,
                     ZoneBudget budget)
    : snapshot_(std::move(snapshot)), queries_(std::move(queries)), budget_(budget) {
  const ModelShape& shape = *snapshot_.shape;
  const size_t group_floats = size_t{shape.group_size()} * shape.key_dim;
  heads_.reserve(shape.kv_head_count);
  for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
    heads_.emplace_back(backend, snapshot_, head,
                        queries_.all().subspan(head * group_floats, group_floats));
  }
}

absl::Status LayerStep::Attend(uint32_t kv_head, bool exact) {
  HeadStep& head = heads_[kv_head];
  WAVEKV_RETURN_IF_ERROR(head.AttendSteady());
  if (exact) {
    head.RetrieveAll();
    return head.AttendRetrieved();
  }
  WAVEKV_RETURN_IF_ERROR(head.PlanZones(budget_));
  WAVEKV_RETURN_IF_ERROR(head.AttendRetrieved());
  return head.EstimateRest(/*bounds=*/false);
}

absl::Status LayerStep::Plan(uint32_t kv_head) {
  WAVEKV_RETURN_IF_ERROR(heads_[kv_head].AttendSteady());
  return heads_[kv_head].PlanZones(budget_);
}

uint64_t LayerStep::WorkBytes(bool exact) const {
  const uint64_t tokens = exact ? snapshot_.token_count : snapshot_.steady_tokens();
  return tokens * snapshot_.shape->token_bytes() + snapshot_.version->index_bytes();
}

StepCounters LayerStep::Counters() const {
  StepCounters counters;
  for (const HeadStep& head : heads_) counters += head.Counters();
  return counters;
}

EstimateOutcome LayerStep::CollectEstimation() const {
  EstimateOutcome outcome;
  outcome.generation = snapshot_.generation;
  outcome.version = snapshot_.version->number();
  const auto append = [](const std::vector<float>& from, std::vector<float>* to) {
    to->insert(to->end(), from.begin(), from.end());
  };
  for (const HeadStep& head : heads_) {
    const EstimatedAttention estimated = head.Estimated();
    append(estimated.attention.out, &outcome.out);
    append(estimated.attention.lse, &outcome.lse);
    append(estimated.lse_lower, &outcome.lse_lower);
    append(estimated.lse_upper, &outcome.lse_upper);
  }
  outcome.counters = Counters();
  return outcome;
}

std::vector<StageHead> LayerStep::StageHeads(bool with_steady) const {
  std::vector<StageHead> heads;
  for (const HeadStep& head : heads_) {
    StageHead stage;
    stage.kv_head = head.kv_head();
    if (with_steady) {
      const RowRuns rows = snapshot_.SteadyRuns(head.kv_head());
      const std::vector<std::shared_ptr<const void>> owners = snapshot_.SteadyOwners();
      for (size_t i = 0; i < rows.size(); ++i) stage.steady.push_back({rows[i], owners[i], 0, 0});
    }
    for (const uint32_t cluster : head.zones().retrieved) {
      const ClusterAddress address = LocateCluster(head.index(), cluster);
      const SegmentHead& segment = *head.index()[address.segment_idx];
      stage.retrieved.push_back({ClusterRows(head.index(), cluster),
                                 snapshot_.version->segments()[address.segment_idx], segment.uid,
                                 segment.first_block[address.cluster_idx]});
    }
    heads.push_back(std::move(stage));
  }
  return heads;
}

RecordedStep LayerStep::Recorded(uint32_t layer, TraceVerb verb) const {
  RecordedStep step;
  step.layer = layer;
  step.verb = verb;
  step.generation = snapshot_.generation;
  step.version = snapshot_.version->number();
  step.token_count = snapshot_.token_count;
  step.budget = budget_;
  step.queries = queries_;
  return step;
}

absl::Status ForEachHead(ThreadPool* pool, uint32_t head_count,
                         const std::function<absl::Status(uint32_t)>& fn) {
  std::vector<absl::Status> statuses(head_count);
  pool->ParallelFor(head_count,
                    [&](size_t head) { statuses[head] = fn(static_cast<uint32_t>(head)); });
  for (absl::Status& status : statuses) {
    if (!status.ok()) return std::move(status);
  }
  return absl::OkStatus();
}

}  // namespace wavekv
