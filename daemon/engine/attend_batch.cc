#include "daemon/engine/attend_batch.h"

#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/validation.h"
#include "storage/base/dtype.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Below this, waking a thread takes longer than the work it would take over.
constexpr uint64_t kSharedWorkBytes = 128 << 10;

// One step under way.
struct Item {
  std::optional<Sequence::Use> sequence;
  std::unique_ptr<LayerStep> step;
  QueryVectors queries;
  std::vector<absl::Status> head_statuses;
};

// Everything up to the snapshot. The append is the last thing that can fail, so that a refused
// step leaves the sequence as it was.
absl::Status Prepare(const StepResources& resources, const TenantId& tenant, const AttendStep& step,
                     Item* item) {
  const LayerQuery& query = step.query;
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Sequence> found,
                          resources.registry->Find(tenant, query.sequence.id));
  item->sequence.emplace(std::move(found));
  Sequence& sequence = **item->sequence;
  const ModelShape& shape = sequence.shape();
  WAVEKV_RETURN_IF_ERROR(ValidateLayer(shape, query.layer));
  WAVEKV_ASSIGN_OR_RETURN(item->queries, ReadQueries(shape, query.queries, shape.query_head_count));
  WAVEKV_ASSIGN_OR_RETURN(const ZoneBudget budget, BudgetOf(sequence, query.layer, query.budget));
  if (step.append_keys.has_value() || step.append_values.has_value()) {
    WAVEKV_ASSIGN_OR_RETURN(const RowBatch batch, ReadAppend(shape, step));
    WAVEKV_RETURN_IF_ERROR(
        sequence.Append(query.sequence.generation, batch, AppendMode::kDecode, nullptr).status());
  }
  WAVEKV_ASSIGN_OR_RETURN(LayerSnapshot snapshot,
                          sequence.Snapshot(query.sequence.generation, query.layer));
  item->step =
      std::make_unique<LayerStep>(resources.backend, std::move(snapshot), item->queries, budget);
  item->head_statuses.resize(item->step->head_count());
  return absl::OkStatus();
}

// Weighted sums of finite values may pass float32's largest number on the way to their mean.
absl::Status CheckAnswer(const AttendStep& step, uint64_t token_count,
                         const std::vector<float>& out) {
  if (FirstNonFinite(DType::kF32, out.data(), out.size()) == out.size()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("sequence ", step.query.sequence.id.value(), ", layer ", step.query.layer,
                   ": the values of its ", token_count,
                   " tokens are too large to be weighed in float32: expected sums under 3.4e38"));
}

// The answer first, then what is done for later steps.
void Finish(const StepResources& resources, const AttendStep& step, Item* item,
            AttendOutcome* outcome) {
  for (const absl::Status& status : item->head_statuses) {
    if (!status.ok()) {
      outcome->status = status;
      return;
    }
  }
  const LayerSnapshot& snapshot = item->step->snapshot();
  outcome->generation = snapshot.generation;
  outcome->version = snapshot.version->number();
  outcome->token_count = snapshot.token_count;
  item->step->CollectAnswer(&outcome->out, &outcome->lse);
  outcome->status = CheckAnswer(step, snapshot.token_count, outcome->out);
  if (!outcome->status.ok()) return;
  outcome->counters = item->step->Counters();
  Sequence& sequence = **item->sequence;
  if (sequence.spec().attach_wave_buffer && !step.exact) {
    // The cache is a matter of speed: an absent wave buffer takes nothing from the answer.
    const absl::StatusOr<StageCounters> touched = resources.stager->Touch(
        sequence.id(), step.query.layer, item->step->StageHeads(/*with_steady=*/false));
    if (touched.ok()) {
      outcome->counters.cache_hit_blocks = touched->hit_blocks;
      outcome->counters.cache_miss_blocks = touched->miss_blocks;
    }
  }
  sequence.RememberQueries(step.query.layer, item->queries);
  sequence.AddCounters(outcome->counters);
}

// Steps that name distinct (sequence, layer) pairs.
void RunWave(const StepResources& resources, const TenantId& tenant,
             std::span<const AttendStep> steps, std::span<AttendOutcome> outcomes) {
  std::vector<Item> items(steps.size());
  std::vector<std::pair<size_t, uint32_t>> work;  // (item, KV head)
  uint64_t work_bytes = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    outcomes[i].status = Prepare(resources, tenant, steps[i], &items[i]);
    if (!outcomes[i].status.ok()) continue;
    for (uint32_t head = 0; head < items[i].step->head_count(); ++head) work.emplace_back(i, head);
    work_bytes += items[i].step->WorkBytes(steps[i].exact);
  }
  const auto attend = [&](size_t w) {
    const auto [i, head] = work[w];
    items[i].head_statuses[head] = items[i].step->Attend(head, steps[i].exact);
  };
  if (work_bytes < kSharedWorkBytes) {
    for (size_t w = 0; w < work.size(); ++w) attend(w);
  } else {
    resources.pool->ParallelFor(work.size(), attend);
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    if (outcomes[i].status.ok()) Finish(resources, steps[i], &items[i], &outcomes[i]);
  }
}

}  // namespace

absl::StatusOr<ZoneBudget> BudgetOf(const Sequence& sequence, uint32_t layer,
                                    const std::optional<ZoneBudget>& budget) {
  if (!budget.has_value()) return sequence.Budget(layer);
  WAVEKV_RETURN_IF_ERROR(ValidateBudget(*budget));
  return *budget;
}

std::vector<AttendOutcome> RunAttendBatch(const StepResources& resources, const TenantId& tenant,
                                          std::span<const AttendStep> steps) {
  std::vector<AttendOutcome> outcomes(steps.size());
  if (steps.size() == 1) {
    RunWave(resources, tenant, steps, outcomes);
    return outcomes;
  }
  for (size_t begin = 0; begin < steps.size();) {
    std::set<std::pair<SequenceId, uint32_t>> named;
    size_t end = begin;
    while (end < steps.size() &&
           named.emplace(steps[end].query.sequence.id, steps[end].query.layer).second) {
      ++end;
    }
    RunWave(resources, tenant, steps.subspan(begin, end - begin),
            std::span(outcomes).subspan(begin, end - begin));
    begin = end;
  }
  return outcomes;
}

}  // namespace wavekv
