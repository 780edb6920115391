#include "client/wire.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/data_wire.h"
#include "proto/rpc/tensor_wire.h"
#include "storage/base/status_macros.h"
#include "storage/base/tensor_bytes.h"

namespace wavekv::client {
namespace {

absl::Status BadReply(absl::string_view why) {
  return absl::InternalError(absl::StrCat("the daemon's reply is malformed: ", why));
}

absl::Status CheckReplyTensor(const v1::Tensor& tensor, const char* name, DType dtype,
                              std::span<const int64_t> shape) {
  const absl::Status status = CheckWireTensor(tensor, name);
  if (!status.ok()) return BadReply(status.message());
  const std::span<const int64_t> found(tensor.shape().data(),
                                       static_cast<size_t>(tensor.shape_size()));
  if (tensor.dtype() != ToWireDType(dtype) ||
      !std::equal(found.begin(), found.end(), shape.begin(), shape.end())) {
    return BadReply(absl::StrCat(name, ": expected ", ShapeText(shape), " of dtype ",
                                 static_cast<int>(dtype), ", found ", ShapeText(found),
                                 " of dtype ", static_cast<int>(tensor.dtype())));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<float>> Floats(const v1::Tensor& tensor, const char* name,
                                          std::initializer_list<int64_t> shape) {
  WAVEKV_RETURN_IF_ERROR(
      CheckReplyTensor(tensor, name, DType::kF32, {shape.begin(), shape.size()}));
  std::vector<float> values(tensor.data().size() / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
  return values;
}

std::vector<std::byte> Bytes(const std::string& data) {
  const auto* const begin = reinterpret_cast<const std::byte*>(data.data());
  return {begin, begin + data.size()};
}

absl::StatusOr<HeadZones> HeadFromWire(const v1::HeadZones& head, const ModelShape& shape) {
  if (head.kv_head() >= shape.kv_head_count) {
    return BadReply(absl::StrCat("KV head ", head.kv_head(), " of ", shape.kv_head_count));
  }
  HeadZones zones;
  zones.kv_head = head.kv_head();
  zones.steady_tokens = head.steady_tokens();
  uint64_t rows = head.steady_tokens();
  for (const v1::ClusterRef& cluster : head.retrieved()) {
    rows += cluster.size();
    zones.retrieved.push_back({.segment_idx = cluster.segment_idx(),
                               .cluster_idx = cluster.cluster_idx(),
                               .size = cluster.size(),
                               .first_block = cluster.first_block(),
                               .estimated_mass = cluster.estimated_mass()});
  }
  uint64_t staged_rows = 0;
  for (const v1::StagedRows& run : head.staged()) {
    staged_rows += run.row_count();
    zones.staged.push_back({.key_offset = run.key_offset(),
                            .value_offset = run.value_offset(),
                            .row_count = run.row_count(),
                            .cache_hit = run.cache_hit()});
  }
  if (head.staged_size() > 0 && staged_rows != rows) {
    return BadReply(absl::StrCat("KV head ", head.kv_head(), ": ", staged_rows,
                                 " rows staged, expected ", rows,
                                 " of the steady zone and the retrieved clusters"));
  }
  if (!head.has_inline_keys() && !head.has_inline_values()) return zones;
  const int64_t inline_rows = static_cast<int64_t>(rows);
  const int64_t key_shape[] = {inline_rows, shape.key_dim};
  const int64_t value_shape[] = {inline_rows, shape.value_dim};
  WAVEKV_RETURN_IF_ERROR(
      CheckReplyTensor(head.inline_keys(), "inline_keys", shape.dtype, key_shape));
  WAVEKV_RETURN_IF_ERROR(
      CheckReplyTensor(head.inline_values(), "inline_values", shape.dtype, value_shape));
  if (head.inline_positions_size() != inline_rows) {
    return BadReply(absl::StrCat("inline_positions: expected ", inline_rows, ", found ",
                                 head.inline_positions_size()));
  }
  zones.inline_keys = Bytes(head.inline_keys().data());
  zones.inline_values = Bytes(head.inline_values().data());
  zones.inline_positions.assign(head.inline_positions().begin(), head.inline_positions().end());
  return zones;
}

void FillBudget(const shm::BudgetRef& budget, v1::Budget* target) {
  switch (budget.kind) {
    case shm::BudgetRefKind::kRatio:
      target->set_ratio(budget.value);
      break;
    case shm::BudgetRefKind::kClusters:
      target->set_clusters(static_cast<uint32_t>(budget.value));
      break;
    case shm::BudgetRefKind::kCoverage:
      target->set_coverage(budget.value);
      break;
    case shm::BudgetRefKind::kError:
      target->set_error(budget.value);
      break;
  }
  target->set_clusters_max(budget.clusters_max);
  target->set_sketch_clusters(budget.sketch_clusters);
  target->set_estimate_ratio(budget.estimate_ratio);
}

// What Attend's items, Query and Estimate have in common.
template <class Message>
void FillLayerQuery(const shm::LayerQueryRequest& query, Message* target) {
  target->mutable_sequence()->set_sequence_id(query.sequence_id);
  target->mutable_sequence()->set_generation(query.generation);
  target->set_layer(query.layer);
  ToWire(query.queries, target->mutable_queries());
  if (query.budget.has_value()) FillBudget(*query.budget, target->mutable_budget());
}

}  // namespace

void ToWire(const Budget& budget, v1::Budget* target) { FillBudget(ToRef(budget), target); }

void ToWire(const SequenceOptions& options, v1::CreateSequenceRequest* request) {
  v1::ModelShape* const shape = request->mutable_shape();
  shape->set_layer_count(options.shape.layer_count);
  shape->set_query_head_count(options.shape.query_head_count);
  shape->set_kv_head_count(options.shape.kv_head_count);
  shape->set_key_dim(options.shape.key_dim);
  shape->set_value_dim(options.shape.value_dim);
  shape->set_dtype(ToWireDType(options.shape.dtype));
  shape->set_softmax_scale(options.shape.softmax_scale);
  shape->set_logit_soft_cap(options.logit_soft_cap);
  shape->set_sliding_window(options.sliding_window);
  shape->set_model_id(options.shape.model_id);
  request->mutable_heads()->set_first_kv_head(options.first_kv_head);
  request->mutable_heads()->set_total_kv_head_count(options.total_kv_head_count);

  v1::IndexOptions* const index = request->mutable_index();
  index->set_segment_tokens(options.index.segment_tokens);
  index->set_small_segment_tokens(options.index.small_segment_tokens);
  index->set_tokens_per_cluster(options.index.tokens_per_cluster);
  index->set_kmeans_iterations(options.index.kmeans_iterations);
  index->set_sketch(options.index.sketch);
  SetBudget(options.index.budget, index);
  for (const auto& [layer, budget] : options.index.layer_budgets) {
    v1::LayerBudget* const layer_budget = index->add_layer_budgets();
    layer_budget->set_layer(layer);
    ToWire(budget, layer_budget->mutable_budget());
  }
  index->mutable_dense_layers()->Assign(options.index.dense_layers.begin(),
                                        options.index.dense_layers.end());
  request->set_max_tokens(options.max_tokens);
  request->set_label(options.label);
  request->set_attach_wave_buffer(options.attach_wave_buffer);
}

void DescribeTensor(const Tensor& tensor, std::span<const int64_t> shape, v1::Tensor* target) {
  target->set_dtype(ToWireDType(tensor.dtype));
  target->set_layout(tensor.layout == Layout::kNHD ? v1::LAYOUT_NHD : v1::LAYOUT_HND);
  target->mutable_shape()->Assign(shape.begin(), shape.end());
}

void ToWire(const Tensor& tensor, v1::Tensor* target) { ToWire(ToRef(tensor), target); }

void ToWire(const shm::TensorRef& tensor, v1::Tensor* target) {
  target->set_dtype(ToWireDType(tensor.dtype));
  target->set_layout(tensor.layout == shm::TensorLayout::kNHD ? v1::LAYOUT_NHD : v1::LAYOUT_HND);
  target->mutable_shape()->Assign(tensor.shape.begin(), tensor.shape.end());
  target->set_data(tensor.data.data(), tensor.data.size());
}

void ToWire(const shm::LayerQueryRequest& query, v1::QueryRequest* target) {
  FillLayerQuery(query, target);
}

void ToWire(const shm::LayerQueryRequest& query, v1::EstimateRequest* target) {
  FillLayerQuery(query, target);
}

void ToWire(const shm::AttendItemRequest& item, v1::AttendItem* target) {
  FillLayerQuery(item.query, target);
  target->set_exact(item.exact);
  if (!item.append_keys.has_value() || !item.append_values.has_value()) return;
  ToWire(*item.append_keys, target->mutable_append_keys());
  ToWire(*item.append_values, target->mutable_append_values());
  target->set_append_position(item.append_position);
}

StepCounters FromWire(const v1::StepCounters& counters) {
  return {.steady_tokens = counters.steady_tokens(),
          .retrieved_clusters = counters.retrieved_clusters(),
          .retrieved_tokens = counters.retrieved_tokens(),
          .estimated_clusters = counters.estimated_clusters(),
          .sketched_clusters = counters.sketched_clusters(),
          .ignored_clusters = counters.ignored_clusters(),
          .moved_to_estimation = counters.moved_to_estimation(),
          .kv_bytes_read = counters.kv_bytes_read(),
          .kv_bytes_full = counters.kv_bytes_full(),
          .cache_hit_blocks = counters.cache_hit_blocks(),
          .cache_miss_blocks = counters.cache_miss_blocks(),
          .error_budget_met = counters.error_budget_met(),
          .error_budget_capped = counters.error_budget_capped()};
}

absl::StatusOr<ModelShape> FromWire(const v1::ModelShape& shape) {
  const absl::StatusOr<DType> dtype = FromWireDType(shape.dtype(), "shape");
  if (!dtype.ok()) return BadReply(dtype.status().message());
  ModelShape result{.layer_count = shape.layer_count(),
                    .query_head_count = shape.query_head_count(),
                    .kv_head_count = shape.kv_head_count(),
                    .key_dim = shape.key_dim(),
                    .value_dim = shape.value_dim(),
                    .dtype = *dtype,
                    .softmax_scale = shape.softmax_scale(),
                    .model_id = shape.model_id()};
  const absl::Status status = ValidateModelShape(result);
  if (!status.ok()) return BadReply(status.message());
  return result;
}

absl::StatusOr<Attention> FromWire(const v1::AttendResult& result, const ModelShape& shape) {
  Attention attention;
  WAVEKV_ASSIGN_OR_RETURN(attention.out,
                          Floats(result.out(), "out", {shape.query_head_count, shape.value_dim}));
  WAVEKV_ASSIGN_OR_RETURN(attention.lse, Floats(result.lse(), "lse", {shape.query_head_count}));
  attention.generation = result.generation();
  attention.version = result.version();
  attention.token_count = result.token_count();
  attention.counters = FromWire(result.counters());
  return attention;
}

absl::StatusOr<Estimation> FromWire(const v1::EstimateReply& reply, const ModelShape& shape) {
  const int64_t heads = shape.query_head_count;
  Estimation estimation;
  WAVEKV_ASSIGN_OR_RETURN(estimation.out, Floats(reply.out(), "out", {heads, shape.value_dim}));
  WAVEKV_ASSIGN_OR_RETURN(estimation.lse, Floats(reply.lse(), "lse", {heads}));
  WAVEKV_ASSIGN_OR_RETURN(estimation.lse_lower, Floats(reply.lse_lower(), "lse_lower", {heads}));
  WAVEKV_ASSIGN_OR_RETURN(estimation.lse_upper, Floats(reply.lse_upper(), "lse_upper", {heads}));
  estimation.generation = reply.generation();
  estimation.version = reply.version();
  estimation.counters = FromWire(reply.counters());
  return estimation;
}

absl::StatusOr<QueryResult> FromWire(const v1::QueryReply& reply, const ModelShape& shape) {
  if (static_cast<uint32_t>(reply.heads_size()) != shape.kv_head_count) {
    return BadReply(absl::StrCat(reply.heads_size(), " KV heads, expected ", shape.kv_head_count));
  }
  QueryResult result;
  result.generation = reply.generation();
  result.version = reply.version();
  result.token_count = reply.token_count();
  result.step = reply.step();
  result.heads.reserve(shape.kv_head_count);
  std::vector<bool> seen(shape.kv_head_count, false);
  for (const v1::HeadZones& head : reply.heads()) {
    WAVEKV_ASSIGN_OR_RETURN(HeadZones zones, HeadFromWire(head, shape));
    if (seen[zones.kv_head]) return BadReply(absl::StrCat("KV head ", zones.kv_head, " twice"));
    seen[zones.kv_head] = true;
    result.heads.push_back(std::move(zones));
  }
  WAVEKV_ASSIGN_OR_RETURN(result.estimation, FromWire(reply.estimation(), shape));
  result.counters = FromWire(reply.counters());
  return result;
}

}  // namespace wavekv::client
