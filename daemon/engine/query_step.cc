#include "daemon/engine/query_step.h"

#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/validation.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// A planned step and the call that keeps its sequence.
struct PlannedStep {
  Sequence::Use sequence;
  QueryVectors queries;
  std::unique_ptr<LayerStep> step;
};

absl::StatusOr<PlannedStep> PlanStep(const StepResources& resources, const TenantId& tenant,
                                     const LayerQuery& query) {
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Sequence> found,
                          resources.registry->Find(tenant, query.sequence.id));
  PlannedStep planned = {Sequence::Use(std::move(found)), {}, nullptr};
  Sequence& sequence = *planned.sequence;
  const ModelShape& shape = sequence.shape();
  WAVEKV_RETURN_IF_ERROR(ValidateLayer(shape, query.layer));
  WAVEKV_ASSIGN_OR_RETURN(planned.queries,
                          ReadQueries(shape, query.queries, shape.query_head_count));
  WAVEKV_ASSIGN_OR_RETURN(const ZoneBudget budget, BudgetOf(sequence, query.layer, query.budget));
  WAVEKV_ASSIGN_OR_RETURN(LayerSnapshot snapshot,
                          sequence.Snapshot(query.sequence.generation, query.layer));
  planned.step =
      std::make_unique<LayerStep>(resources.backend, std::move(snapshot), planned.queries, budget);
  LayerStep& step = *planned.step;
  WAVEKV_RETURN_IF_ERROR(ForEachHead(resources.pool, step.head_count(),
                                     [&](uint32_t head) { return step.Plan(head); }));
  return planned;
}

// The rows of one head as bytes: steady, then retrieved, each with its token position.
void CopyInline(LayerStep& step, uint32_t kv_head, HeadZones* zones) {
  const ModelShape& shape = *step.snapshot().shape;
  const auto append = [&](const RowRun& rows) {
    zones->inline_keys.insert(zones->inline_keys.end(), rows.keys,
                              rows.keys + rows.row_count * shape.key_bytes());
    zones->inline_values.insert(zones->inline_values.end(), rows.values,
                                rows.values + rows.row_count * shape.value_bytes());
  };
  for (const RowRun& rows : step.snapshot().SteadyRuns(kv_head)) append(rows);
  zones->inline_positions = step.snapshot().SteadyPositions();
  const HeadStep& head = step.head(kv_head);
  for (const uint32_t cluster : head.zones().retrieved) {
    append(ClusterRows(head.index(), cluster));
    const ClusterAddress address = LocateCluster(head.index(), cluster);
    const SegmentHead& segment = *head.index()[address.segment_idx];
    for (uint32_t row = segment.first_row[address.cluster_idx];
         row < segment.first_row[address.cluster_idx + 1]; ++row) {
      zones->inline_positions.push_back(segment.first_position + segment.row_to_offset[row]);
    }
  }
}

HeadZones DescribeZones(const HeadStep& head, uint64_t steady_tokens) {
  HeadZones zones;
  zones.kv_head = head.kv_head();
  zones.steady_tokens = steady_tokens;
  for (const uint32_t cluster : head.zones().retrieved) {
    const ClusterAddress address = LocateCluster(head.index(), cluster);
    const SegmentHead& segment = *head.index()[address.segment_idx];
    zones.retrieved.push_back(
        {address.segment_idx, address.cluster_idx, segment.sizes[address.cluster_idx],
         segment.first_block[address.cluster_idx], std::log(head.scores().mass_share[cluster])});
  }
  return zones;
}

// What the answer will hold at most: staging may move clusters to estimation.
std::vector<HeadExtent> Extents(LayerStep& step, bool staged, bool inline_rows) {
  const uint64_t steady_tokens = step.snapshot().steady_tokens();
  std::vector<HeadExtent> extents(step.head_count());
  for (uint32_t kv_head = 0; kv_head < step.head_count(); ++kv_head) {
    const HeadStep& head = step.head(kv_head);
    HeadExtent& extent = extents[kv_head];
    extent.retrieved = head.zones().retrieved.size();
    if (staged) extent.staged = step.snapshot().SteadyRuns(kv_head).size();
    if (inline_rows) extent.inline_rows = steady_tokens;
    for (const uint32_t cluster : head.zones().retrieved) {
      const uint64_t rows = ClusterRows(head.index(), cluster).row_count;
      if (staged) extent.staged += (rows + kBlockTokens - 1) / kBlockTokens;
      if (inline_rows) extent.inline_rows += rows;
    }
  }
  return extents;
}

// Brings the planned rows to the wave buffer; what does not fit moves to the estimation zone.
absl::StatusOr<StagedStep> Stage(const StepResources& resources, const Sequence& sequence,
                                 uint32_t layer, uint64_t completed_step, LayerStep* step) {
  const std::vector<StageHead> wanted = step->StageHeads(/*with_steady=*/true);
  WAVEKV_ASSIGN_OR_RETURN(StagedStep staged,
                          resources.stager->Stage(sequence.id(), layer, completed_step, wanted));
  if (staged.heads.size() != wanted.size()) {
    return absl::InternalError(absl::StrCat("the wave buffer staged ", staged.heads.size(),
                                            " KV heads, expected ", wanted.size()));
  }
  for (const StagedHead& head : staged.heads) {
    if (head.kv_head >= step->head_count()) {
      return absl::InternalError(absl::StrCat("the wave buffer staged KV head ", head.kv_head,
                                              ", expected less than ", step->head_count()));
    }
    step->head(head.kv_head).KeepRetrieved(head.retrieved_runs);
  }
  return staged;
}

StagedRows ToStagedRows(const StagedSpan& span) {
  return {span.key_offset, span.value_offset, span.row_count, span.cache_hit};
}

}  // namespace

absl::StatusOr<QueryOutcome> RunQuery(const StepResources& resources, const TenantId& tenant,
                                      const LayerQuery& query, const QueryOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(PlannedStep planned, PlanStep(resources, tenant, query));
  Sequence& sequence = *planned.sequence;
  LayerStep& step = *planned.step;
  const bool stages = sequence.spec().attach_wave_buffer;
  if (options.admit != nullptr) {
    WAVEKV_RETURN_IF_ERROR(
        options.admit(sequence.shape(), Extents(step, stages, options.inline_rows)));
  }
  sequence.RememberQueries(query.layer, planned.queries);
  StagedStep staged;
  if (stages) {
    absl::StatusOr<StagedStep> result =
        Stage(resources, sequence, query.layer, options.completed_step, &step);
    // Without the wave buffer the rows can still go inline.
    if (!result.ok() && !(options.inline_rows && absl::IsUnavailable(result.status()))) {
      return result.status();
    }
    if (result.ok()) staged = *std::move(result);
  }
  WAVEKV_RETURN_IF_ERROR(ForEachHead(resources.pool, step.head_count(), [&](uint32_t head) {
    return step.head(head).EstimateRest(/*bounds=*/true);
  }));

  QueryOutcome outcome;
  outcome.generation = step.snapshot().generation;
  outcome.version = step.snapshot().version->number();
  outcome.token_count = step.snapshot().token_count;
  outcome.step = staged.step;
  for (uint32_t head = 0; head < step.head_count(); ++head) {
    outcome.heads.push_back(DescribeZones(step.head(head), step.snapshot().steady_tokens()));
    if (options.inline_rows) CopyInline(step, head, &outcome.heads.back());
  }
  for (const StagedHead& head : staged.heads) {
    std::vector<StagedRows>& rows = outcome.heads[head.kv_head].staged;
    for (const StagedSpan& span : head.steady) rows.push_back(ToStagedRows(span));
    for (const StagedSpan& span : head.retrieved) rows.push_back(ToStagedRows(span));
  }
  outcome.estimation = step.CollectEstimation();
  outcome.counters = outcome.estimation.counters;
  outcome.counters.cache_hit_blocks = staged.hit_blocks;
  outcome.counters.cache_miss_blocks = staged.miss_blocks;
  sequence.AddCounters(outcome.counters);
  if (sequence.recorded()) sequence.RecordStep(step.Recorded(query.layer, TraceVerb::kQuery));
  return outcome;
}

absl::StatusOr<EstimateOutcome> RunEstimate(const StepResources& resources, const TenantId& tenant,
                                            const LayerQuery& query) {
  WAVEKV_ASSIGN_OR_RETURN(const PlannedStep planned, PlanStep(resources, tenant, query));
  LayerStep& step = *planned.step;
  planned.sequence->RememberQueries(query.layer, planned.queries);
  WAVEKV_RETURN_IF_ERROR(ForEachHead(resources.pool, step.head_count(), [&](uint32_t head) {
    return step.head(head).EstimateRest(/*bounds=*/true);
  }));
  Sequence& sequence = *planned.sequence;
  if (sequence.recorded()) sequence.RecordStep(step.Recorded(query.layer, TraceVerb::kEstimate));
  return step.CollectEstimation();
}

}  // namespace wavekv
