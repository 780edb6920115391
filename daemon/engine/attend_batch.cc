#include "daemon/engine/attend_batch.h"

#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "daemon/engine/validation.h"
#include "storage/base/dtype.h"
#include "storage/base/status_macros.h"
#include "storage/base/stream_copy.h"

namespace wavekv {
namespace {

// Below this, waking a thread takes longer than the work it would take over.
constexpr uint64_t kSharedWorkBytes = 128 << 10;

// One step under way.
struct Item {
  std::optional<Sequence::Use> sequence;
  std::optional<LayerStep> step;
  QueryVectors queries;
  AnswerSink::Place place;
  bool place_is_ours = false;
  // The answer for who records the sequence; empty when nobody did as the step began. What a sink's
  // place holds is not read back.
  PartialAttention recorded;
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
  item->step.emplace(resources.backend, std::move(snapshot), item->queries, budget);
  item->head_statuses.resize(item->step->head_count());
  return absl::OkStatus();
}

// Where the step's answer goes: the sink's place, or the outcome.
void FindPlace(AnswerSink* sink, size_t step_idx, Item* item, AttendOutcome* outcome) {
  const ModelShape& shape = *item->step->snapshot().shape;
  if ((*item->sequence)->recorded()) {
    item->recorded = EmptyAttention(shape.query_head_count, shape.value_dim);
  }
  if (sink != nullptr) {
    item->place = sink->PlaceOf(step_idx, shape.query_head_count, shape.value_dim);
    return;
  }
  outcome->out.resize(size_t{shape.query_head_count} * shape.value_dim);
  outcome->lse.resize(shape.query_head_count);
  item->place = {reinterpret_cast<std::byte*>(outcome->out.data()),
                 reinterpret_cast<std::byte*>(outcome->lse.data())};
  item->place_is_ours = true;
}

// Writes one KV head's answer to its part of the step's place. The place may be anybody's to write:
// what is checked is our own copy.
absl::Status WriteAnswer(const AttendStep& step, uint32_t kv_head, const PartialAttention& answer,
                         Item* item) {
  // Weighted sums of finite values may pass float32's largest number on the way to their mean.
  if (FirstNonFinite(DType::kF32, answer.out.data(), answer.out.size()) != answer.out.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", step.query.sequence.id.value(), ", layer ", step.query.layer,
                     ": the values of its ", item->step->snapshot().token_count,
                     " tokens are too large to be weighed in float32: expected sums under 3.4e38"));
  }
  if (!item->recorded.lse.empty()) {
    absl::c_copy(answer.out, item->recorded.out.begin() + kv_head * answer.out.size());
    absl::c_copy(answer.lse, item->recorded.lse.begin() + kv_head * answer.lse.size());
  }
  if (item->place.out == nullptr) return absl::OkStatus();
  const size_t out_bytes = answer.out.size() * sizeof(float);
  const size_t lse_bytes = answer.lse.size() * sizeof(float);
  std::byte* const out = item->place.out + kv_head * out_bytes;
  if (item->place_is_ours) {
    std::memcpy(out, answer.out.data(), out_bytes);
  } else {
    StreamCopy(out, answer.out.data(), out_bytes);
  }
  std::memcpy(item->place.lse + kv_head * lse_bytes, answer.lse.data(), lse_bytes);
  return absl::OkStatus();
}

// A KV head's attention, written out at once: the next head's is computed meanwhile.
absl::Status AttendHead(const AttendStep& step, uint32_t kv_head, Item* item) {
  thread_local PartialAttention memory;  // From head to head.
  HeadStep& head = item->step->head(kv_head);
  head.LendMemory(&memory);
  absl::Status status = item->step->Attend(kv_head, step.exact);
  if (status.ok()) {
    const PartialAttention* const whole = head.OnlyPart();
    status = whole != nullptr ? WriteAnswer(step, kv_head, *whole, item)
                              : WriteAnswer(step, kv_head, head.Answer(), item);
  }
  head.TakeBackMemory(&memory);
  return status;
}

// What is left once the answer is written: what it says of itself, and what later steps are served
// by.
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
  if (!item->recorded.lse.empty()) {
    RecordedStep recorded = item->step->Recorded(step.query.layer, TraceVerb::kAttend);
    recorded.exact = step.exact;
    recorded.out = std::move(item->recorded.out);
    recorded.lse = std::move(item->recorded.lse);
    sequence.RecordStep(std::move(recorded));
  }
}

// Steps that name distinct (sequence, layer) pairs, the first of them the call's first_idx-th.
void RunWave(const StepResources& resources, const TenantId& tenant,
             std::span<const AttendStep> steps, size_t first_idx, AnswerSink* sink,
             std::span<AttendOutcome> outcomes) {
  std::vector<Item> items(steps.size());
  absl::InlinedVector<std::pair<size_t, uint32_t>, 16> work;  // (item, KV head)
  uint64_t work_bytes = 0;
  for (size_t i = 0; i < steps.size(); ++i) {
    outcomes[i].status = Prepare(resources, tenant, steps[i], &items[i]);
    if (!outcomes[i].status.ok()) continue;
    FindPlace(sink, first_idx + i, &items[i], &outcomes[i]);
    for (uint32_t head = 0; head < items[i].step->head_count(); ++head) work.emplace_back(i, head);
    work_bytes += items[i].step->WorkBytes(steps[i].exact);
  }
  const auto attend = [&](size_t w) {
    const auto [i, head] = work[w];
    items[i].head_statuses[head] = AttendHead(steps[i], head, &items[i]);
  };
  if (work_bytes < kSharedWorkBytes) {
    for (size_t w = 0; w < work.size(); ++w) attend(w);
    StreamFence();
  } else {
    resources.pool->ParallelFor(work.size(), [&attend](size_t w) {
      attend(w);
      StreamFence();
    });
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
                                          std::span<const AttendStep> steps, AnswerSink* sink) {
  std::vector<AttendOutcome> outcomes(steps.size());
  if (steps.size() == 1) {
    RunWave(resources, tenant, steps, 0, sink, outcomes);
    return outcomes;
  }
  for (size_t begin = 0; begin < steps.size();) {
    std::set<std::pair<SequenceId, uint32_t>> named;
    size_t end = begin;
    while (end < steps.size() &&
           named.emplace(steps[end].query.sequence.id, steps[end].query.layer).second) {
      ++end;
    }
    RunWave(resources, tenant, steps.subspan(begin, end - begin), begin, sink,
            std::span(outcomes).subspan(begin, end - begin));
    begin = end;
  }
  return outcomes;
}

}  // namespace wavekv
