#include "daemon/server/wire_requests.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/rpc/tensor_wire.h"
#include "storage/base/model_shape.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

absl::string_view Absl(std::string_view text) { return {text.data(), text.size()}; }

// A value, or `fallback` for 0, which on the wire means "the default".
uint32_t OrDefault(uint32_t value, uint32_t fallback) { return value == 0 ? fallback : value; }

absl::Status CheckCount(std::string_view name, int count, uint32_t count_max) {
  if (static_cast<uint32_t>(count) <= count_max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(Absl(name), " has ", count, " entries, expected at most ", count_max));
}

absl::StatusOr<TensorView> ParseTensor(const v1::Tensor& tensor, std::string_view name) {
  WAVEKV_RETURN_IF_ERROR(CheckWireTensor(tensor, name));
  WAVEKV_ASSIGN_OR_RETURN(const DType dtype, FromWireDType(tensor.dtype(), name));
  return TensorView{.dtype = dtype,
                    .shape = {tensor.shape().data(), static_cast<size_t>(tensor.shape_size())},
                    .layout = tensor.layout() == v1::LAYOUT_HND ? Layout::kHND : Layout::kNHD,
                    .data = std::as_bytes(std::span(tensor.data().data(), tensor.data().size()))};
}

absl::StatusOr<TensorView> ParseRequiredTensor(bool has_tensor, const v1::Tensor& tensor,
                                               std::string_view name) {
  if (!has_tensor) return absl::InvalidArgumentError(absl::StrCat(Absl(name), " is missing"));
  return ParseTensor(tensor, name);
}

// The fields that Query, Estimate, Attend and Explain share.
template <class Request>
absl::StatusOr<LayerQuery> ParseLayerQuery(const Request& request, bool queries_required) {
  LayerQuery query;
  WAVEKV_ASSIGN_OR_RETURN(query.sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  query.layer = request.layer();
  if (queries_required || request.has_queries()) {
    WAVEKV_ASSIGN_OR_RETURN(
        query.queries, ParseRequiredTensor(request.has_queries(), request.queries(), "queries"));
  }
  WAVEKV_ASSIGN_OR_RETURN(query.budget,
                          ParseBudget(request.has_budget(), request.budget(), "budget"));
  return query;
}

absl::StatusOr<ModelShape> ParseModelShape(const v1::ModelShape& wire) {
  // Written so that NaN is refused, too.
  if (!(wire.logit_soft_cap() == 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shape.logit_soft_cap is ", wire.logit_soft_cap(),
        ": this engine does not support logit soft caps; keep such layers in the engine"));
  }
  if (wire.sliding_window() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "shape.sliding_window is ", wire.sliding_window(),
        ": this engine does not support sliding windows; keep such layers in the engine"));
  }
  ModelShape shape;
  shape.layer_count = wire.layer_count();
  shape.query_head_count = wire.query_head_count();
  shape.kv_head_count = wire.kv_head_count();
  shape.key_dim = wire.key_dim();
  shape.value_dim = wire.value_dim();
  WAVEKV_ASSIGN_OR_RETURN(shape.dtype, FromWireDType(wire.dtype(), "shape.dtype"));
  shape.softmax_scale = wire.softmax_scale();
  shape.model_id = wire.model_id();
  WAVEKV_RETURN_IF_ERROR(ValidateModelShape(shape));
  return shape;
}

absl::StatusOr<IndexConfig> ParseIndexConfig(const v1::IndexOptions& wire) {
  IndexConfig config;
  config.segment_tokens = OrDefault(wire.segment_tokens(), config.segment_tokens);
  config.small_segment_tokens = OrDefault(wire.small_segment_tokens(), config.small_segment_tokens);
  config.tokens_per_cluster = OrDefault(wire.tokens_per_cluster(), config.tokens_per_cluster);
  config.kmeans_iterations = OrDefault(wire.kmeans_iterations(), config.kmeans_iterations);
  if (wire.has_sketch()) config.sketch = wire.sketch();
  WAVEKV_ASSIGN_OR_RETURN(const std::optional<ZoneBudget> budget,
                          ParseBudget(wire.has_budget(), wire.budget(), "index.budget"));
  config.budget = budget.value_or(ZoneBudget{});
  WAVEKV_RETURN_IF_ERROR(CheckCount("index.layer_budgets", wire.layer_budgets_size(), kLayersMax));
  for (const v1::LayerBudget& entry : wire.layer_budgets()) {
    const std::string name = absl::StrCat("index.layer_budgets[layer ", entry.layer(), "]");
    WAVEKV_ASSIGN_OR_RETURN(const std::optional<ZoneBudget> layer_budget,
                            ParseBudget(entry.has_budget(), entry.budget(), name));
    if (!layer_budget.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(name, " has no budget"));
    }
    config.layer_budgets.emplace_back(entry.layer(), *layer_budget);
  }
  WAVEKV_RETURN_IF_ERROR(CheckCount("index.dense_layers", wire.dense_layers_size(), kLayersMax));
  config.dense_layers.assign(wire.dense_layers().begin(), wire.dense_layers().end());
  return config;
}

}  // namespace

absl::StatusOr<SequenceRef> ParseSequenceRef(bool has_sequence, const v1::SequenceRef& sequence) {
  if (!has_sequence || sequence.sequence_id() == 0) {
    return absl::InvalidArgumentError("sequence.sequence_id is missing");
  }
  return SequenceRef{.id = SequenceId(sequence.sequence_id()),
                     .generation = Generation(sequence.generation())};
}

absl::StatusOr<std::optional<ZoneBudget>> ParseBudget(bool has_budget, const v1::Budget& wire,
                                                      std::string_view name) {
  if (!has_budget) return std::optional<ZoneBudget>();
  ZoneBudget budget;
  switch (wire.kind_case()) {
    case v1::Budget::kRatio:
      budget.kind = BudgetKind::kRatio;
      budget.value = wire.ratio();
      break;
    case v1::Budget::kClusters:
      budget.kind = BudgetKind::kClusters;
      budget.value = wire.clusters();
      break;
    case v1::Budget::kCoverage:
      budget.kind = BudgetKind::kCoverage;
      budget.value = wire.coverage();
      break;
    case v1::Budget::kError:
      budget.kind = BudgetKind::kError;
      budget.value = wire.error();
      break;
    case v1::Budget::KIND_NOT_SET:
      return absl::InvalidArgumentError(
          absl::StrCat(Absl(name), " has no kind: expected ratio, clusters, coverage or error"));
  }
  budget.clusters_max = wire.clusters_max();
  if (wire.has_sketch_clusters()) budget.sketch_clusters = wire.sketch_clusters();
  if (wire.has_estimate_ratio()) budget.estimate_ratio = wire.estimate_ratio();
  return std::optional<ZoneBudget>(budget);
}

absl::Status CheckLabel(std::string_view label) {
  if (label.size() <= kLabelBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("label has ", label.size(), " bytes, expected at most ", kLabelBytesMax));
}

absl::StatusOr<SequenceSpec> ParseSequenceSpec(const v1::CreateSequenceRequest& request) {
  if (!request.has_shape()) return absl::InvalidArgumentError("shape is missing");
  WAVEKV_RETURN_IF_ERROR(CheckLabel(request.label()));
  SequenceSpec spec;
  WAVEKV_ASSIGN_OR_RETURN(spec.shape, ParseModelShape(request.shape()));
  spec.first_kv_head = request.heads().first_kv_head();
  spec.total_kv_head_count = request.heads().total_kv_head_count();
  WAVEKV_ASSIGN_OR_RETURN(spec.index, ParseIndexConfig(request.index()));
  spec.max_tokens = request.max_tokens();
  spec.label = request.label();
  spec.attach_wave_buffer = request.attach_wave_buffer();
  return spec;
}

absl::StatusOr<InsertChunk> ParseInsertChunk(const v1::InsertRequest& request) {
  WAVEKV_RETURN_IF_ERROR(CheckCount("layers", request.layers_size(), kLayersMax));
  InsertChunk chunk;
  chunk.first_position = request.first_position();
  chunk.layers = {request.layers().data(), static_cast<size_t>(request.layers_size())};
  WAVEKV_ASSIGN_OR_RETURN(chunk.keys,
                          ParseRequiredTensor(request.has_keys(), request.keys(), "keys"));
  WAVEKV_ASSIGN_OR_RETURN(chunk.values,
                          ParseRequiredTensor(request.has_values(), request.values(), "values"));
  return chunk;
}

std::vector<LabelRange> ParseLabels(const v1::GiveLabelsRequest& request) {
  std::vector<LabelRange> segments;
  for (const v1::SegmentLabels& wire : request.segments()) {
    const std::string& labels = wire.labels();
    segments.push_back({.first_position = wire.first_position(),
                        .token_count = wire.token_count(),
                        .labels = std::as_bytes(std::span(labels.data(), labels.size()))});
  }
  return segments;
}

absl::StatusOr<LayerQuery> ParseQuery(const v1::QueryRequest& request) {
  return ParseLayerQuery(request, true);
}

absl::StatusOr<LayerQuery> ParseEstimate(const v1::EstimateRequest& request) {
  return ParseLayerQuery(request, true);
}

absl::StatusOr<AttendStep> ParseAttendItem(const v1::AttendItem& item) {
  AttendStep step;
  WAVEKV_ASSIGN_OR_RETURN(step.query, ParseLayerQuery(item, true));
  if (item.has_append_keys() != item.has_append_values()) {
    return absl::InvalidArgumentError("append_keys and append_values come together");
  }
  if (item.has_append_keys()) {
    WAVEKV_ASSIGN_OR_RETURN(step.append_keys, ParseTensor(item.append_keys(), "append_keys"));
    WAVEKV_ASSIGN_OR_RETURN(step.append_values, ParseTensor(item.append_values(), "append_values"));
  }
  step.append_position = item.append_position();
  step.exact = item.exact();
  return step;
}

absl::StatusOr<LayerQuery> ParseExplain(const v1::ExplainRequest& request) {
  return ParseLayerQuery(request, false);
}

absl::StatusOr<RecallRequest> ParseSampleRecall(const v1::SampleRecallRequest& request) {
  RecallRequest recall;
  WAVEKV_ASSIGN_OR_RETURN(recall.sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  WAVEKV_RETURN_IF_ERROR(CheckCount("layers", request.layers_size(), kLayersMax));
  recall.layers = {request.layers().data(), static_cast<size_t>(request.layers_size())};
  if (request.has_queries()) {
    WAVEKV_ASSIGN_OR_RETURN(recall.queries, ParseTensor(request.queries(), "queries"));
  }
  WAVEKV_ASSIGN_OR_RETURN(recall.budget,
                          ParseBudget(request.has_budget(), request.budget(), "budget"));
  return recall;
}

}  // namespace wavekv
