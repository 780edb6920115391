#include "daemon/dataplane/data_requests.h"

#include <algorithm>
#include <vector>

namespace wavekv {
namespace {

TensorView ToView(const shm::TensorRef& tensor) {
  return {.dtype = tensor.dtype,
          .shape = tensor.shape,
          .layout = tensor.layout == shm::TensorLayout::kHND ? Layout::kHND : Layout::kNHD,
          .data = tensor.data};
}

BudgetKind ToKind(shm::BudgetRefKind kind) {
  switch (kind) {
    case shm::BudgetRefKind::kRatio:
      return BudgetKind::kRatio;
    case shm::BudgetRefKind::kClusters:
      return BudgetKind::kClusters;
    case shm::BudgetRefKind::kCoverage:
      return BudgetKind::kCoverage;
    case shm::BudgetRefKind::kError:
      return BudgetKind::kError;
  }
  return BudgetKind::kRatio;
}

shm::WireCounters ToWire(const StepCounters& counters) {
  return {.steady_tokens = counters.steady_tokens,
          .retrieved_clusters = counters.retrieved_clusters,
          .retrieved_tokens = counters.retrieved_tokens,
          .estimated_clusters = counters.estimated_clusters,
          .sketched_clusters = counters.sketched_clusters,
          .ignored_clusters = counters.ignored_clusters,
          .moved_to_estimation = counters.moved_to_estimation,
          .kv_bytes_read = counters.kv_bytes_read,
          .kv_bytes_full = counters.kv_bytes_full,
          .cache_hit_blocks = counters.cache_hit_blocks,
          .cache_miss_blocks = counters.cache_miss_blocks,
          .error_budget_met = counters.error_budget_met,
          .error_budget_capped = counters.error_budget_capped};
}

template <class Element>
shm::WireRun Add(const std::vector<Element>& elements, shm::ReplyWriter* writer) {
  return writer->Add(elements.data(), elements.size());
}

// The record of an estimation, its arrays added to the reply.
shm::WireEstimateReply AddEstimation(const EstimateOutcome& outcome, shm::ReplyWriter* writer) {
  return {.generation = outcome.generation.value(),
          .version = outcome.version,
          .out = Add(outcome.out, writer),
          .lse = Add(outcome.lse, writer),
          .lse_lower = Add(outcome.lse_lower, writer),
          .lse_upper = Add(outcome.lse_upper, writer),
          .counters = ToWire(outcome.counters)};
}

shm::WireHeadZones AddHead(const HeadZones& head, shm::ReplyWriter* writer) {
  std::vector<shm::WireCluster> clusters;
  clusters.reserve(head.retrieved.size());
  for (const RetrievedCluster& cluster : head.retrieved) {
    clusters.push_back({.segment_idx = cluster.segment_idx,
                        .cluster_idx = cluster.cluster_idx,
                        .size = cluster.size,
                        .first_block = cluster.first_block,
                        .estimated_mass = cluster.estimated_mass});
  }
  std::vector<shm::WireStagedRows> staged;
  staged.reserve(head.staged.size());
  for (const StagedRows& rows : head.staged) {
    staged.push_back({.key_offset = rows.key_offset,
                      .value_offset = rows.value_offset,
                      .row_count = rows.row_count,
                      .cache_hit = rows.cache_hit ? 1u : 0u});
  }
  return {.kv_head = head.kv_head,
          .steady_tokens = head.steady_tokens,
          .retrieved = Add(clusters, writer),
          .staged = Add(staged, writer),
          .inline_keys = Add(head.inline_keys, writer),
          .inline_values = Add(head.inline_values, writer),
          .inline_positions = Add(head.inline_positions, writer)};
}

}  // namespace

InsertChunk ToEngine(const shm::InsertRequest& request) {
  return {.sequence = {SequenceId(request.sequence_id), Generation(request.generation)},
          .first_position = request.first_position,
          .layers = request.layers,
          .keys = ToView(request.keys),
          .values = ToView(request.values)};
}

LayerQuery ToEngine(const shm::LayerQueryRequest& request) {
  LayerQuery query;
  query.sequence = {SequenceId(request.sequence_id), Generation(request.generation)};
  query.layer = request.layer;
  query.queries = ToView(request.queries);
  if (request.budget.has_value()) {
    query.budget = ZoneBudget{.kind = ToKind(request.budget->kind),
                              .value = request.budget->value,
                              .clusters_max = request.budget->clusters_max,
                              .estimate_ratio = request.budget->estimate_ratio,
                              .sketch_clusters = request.budget->sketch_clusters};
  }
  return query;
}

AttendStep ToEngine(const shm::AttendItemRequest& request) {
  AttendStep step;
  step.query = ToEngine(request.query);
  if (request.append_keys.has_value()) step.append_keys = ToView(*request.append_keys);
  if (request.append_values.has_value()) step.append_values = ToView(*request.append_values);
  step.append_position = request.append_position;
  step.exact = request.exact;
  return step;
}

void WriteInsert(const InsertOutcome& outcome, shm::ReplyWriter* writer) {
  const uint64_t at = writer->Reserve(sizeof(shm::WireInsertReply));
  writer->Put(at, shm::WireInsertReply{.generation = outcome.generation.value(),
                                       .token_count = outcome.token_count});
}

void WriteEstimate(const EstimateOutcome& outcome, shm::ReplyWriter* writer) {
  const uint64_t at = writer->Reserve(sizeof(shm::WireEstimateReply));
  writer->Put(at, AddEstimation(outcome, writer));
}

void WriteQuery(const QueryOutcome& outcome, shm::ReplyWriter* writer) {
  const size_t head_count = outcome.heads.size();
  const uint64_t at =
      writer->Reserve(sizeof(shm::WireQueryReply) + head_count * sizeof(shm::WireHeadZones));
  shm::WireQueryReply reply;
  reply.generation = outcome.generation.value();
  reply.version = outcome.version;
  reply.token_count = outcome.token_count;
  reply.step = outcome.step;
  reply.head_count = head_count;
  reply.counters = ToWire(outcome.counters);
  reply.estimation = AddEstimation(outcome.estimation, writer);
  writer->Put(at, reply);
  for (size_t i = 0; i < head_count; ++i) {
    writer->Put(at + sizeof reply + i * sizeof(shm::WireHeadZones),
                AddHead(outcome.heads[i], writer));
  }
}

uint64_t QueryReplyBytes(const ModelShape& shape, std::span<const HeadExtent> heads) {
  // The record of the estimation is part of the reply's.
  const uint64_t lse_bytes = uint64_t{shape.query_head_count} * sizeof(float);
  uint64_t bytes =
      shm::ArenaRounded(sizeof(shm::WireQueryReply) + heads.size() * sizeof(shm::WireHeadZones)) +
      shm::ArenaRounded(lse_bytes * shape.value_dim) + 3 * shm::ArenaRounded(lse_bytes);
  for (const HeadExtent& head : heads) {
    bytes += shm::ArenaRounded(head.retrieved * sizeof(shm::WireCluster)) +
             shm::ArenaRounded(head.staged * sizeof(shm::WireStagedRows)) +
             shm::ArenaRounded(head.inline_rows * shape.key_bytes()) +
             shm::ArenaRounded(head.inline_rows * shape.value_bytes()) +
             shm::ArenaRounded(head.inline_rows * sizeof(uint64_t));
  }
  return bytes;
}

void WriteAttendHead(size_t result_count, shm::ReplyWriter* writer) {
  const uint64_t at =
      writer->Reserve(sizeof(shm::WireAttendReply) + result_count * sizeof(shm::WireAttendResult));
  shm::WireAttendReply reply;
  reply.result_count = static_cast<uint32_t>(result_count);
  writer->Put(at, reply);
}

AnswerRuns ReserveAnswer(uint32_t query_heads, uint32_t value_dim, shm::ReplyWriter* writer) {
  const uint64_t lse_bytes = uint64_t{query_heads} * sizeof(float);
  const uint64_t out_bytes = lse_bytes * value_dim;
  const uint64_t lse_at = shm::ArenaRounded(out_bytes);
  const uint64_t at =
      writer->Reserve(std::max<uint64_t>(lse_at + lse_bytes, shm::kErrorTextBytesMax));
  return {.out = {at, out_bytes}, .lse = {at + lse_at, lse_bytes}};
}

void WriteAttendResult(const AttendOutcome& outcome, const AnswerRuns& answer, size_t result_idx,
                       shm::ReplyWriter* writer) {
  shm::WireAttendResult result;
  result.code = static_cast<uint64_t>(outcome.status.code());
  if (outcome.status.ok()) {
    result.generation = outcome.generation.value();
    result.version = outcome.version;
    result.token_count = outcome.token_count;
    result.out = answer.out;
    result.lse = answer.lse;
    result.counters = ToWire(outcome.counters);
  } else if (answer.out.bytes > 0) {
    result.text = writer->PutText(answer.out.offset, outcome.status.message());
  } else {
    result.text = writer->AddText(outcome.status.message());
  }
  writer->Put(sizeof(shm::WireAttendReply) + result_idx * sizeof result, result);
}

}  // namespace wavekv
