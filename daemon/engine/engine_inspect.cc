// The engine's inspection calls: which snapshot, which queries, which budget.
#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/engine_impl.h"
#include "daemon/engine/inspection.h"
#include "daemon/engine/validation.h"
#include "storage/base/status_macros.h"
#include "storage/base/tensor_bytes.h"

namespace wavekv {
namespace {

absl::Status ValidateKvHead(const ModelShape& shape, uint32_t kv_head) {
  if (kv_head < shape.kv_head_count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("kv_head is ", kv_head, ", expected less than ", shape.kv_head_count));
}

// The vectors of one KV head's group: given as [group, key_dim] or [query_heads, key_dim], or the
// last the layer has seen.
absl::StatusOr<std::vector<float>> GroupQueries(const Sequence& sequence,
                                                const LayerSnapshot& snapshot,
                                                const LayerQuery& query, uint32_t kv_head) {
  const ModelShape& shape = sequence.shape();
  const size_t group_floats = size_t{shape.group_size()} * shape.key_dim;
  QueryVectors vectors = snapshot.last_queries;
  if (!query.queries.shape.empty()) {
    const bool group_only = query.queries.shape[0] == shape.group_size();
    WAVEKV_ASSIGN_OR_RETURN(vectors,
                            ReadQueries(shape, query.queries,
                                        group_only ? shape.group_size() : shape.query_head_count));
  }
  if (vectors.floats == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", sequence.id().value(), ", layer ", query.layer,
                     " has seen no query yet; attend first, or give one"));
  }
  const size_t first = vectors.count == group_floats ? 0 : kv_head * group_floats;
  const std::span<const float> group = vectors.all().subspan(first, group_floats);
  return std::vector<float>(group.begin(), group.end());
}

// One layer's part of queries [layers, query_heads, key_dim].
absl::StatusOr<QueryVectors> QueriesOfLayer(const ModelShape& shape, const TensorView& queries,
                                            size_t layer_idx, size_t layer_count) {
  if (queries.shape.size() != 3 || queries.shape[0] != static_cast<int64_t>(layer_count) ||
      queries.data.size() % layer_count != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("queries have shape ", ShapeText(queries.shape), " and ", queries.data.size(),
                     " bytes, expected [layers, query_heads, key_dim] = [", layer_count, ", ",
                     shape.query_head_count, ", ", shape.key_dim, "]"));
  }
  const size_t layer_bytes = queries.data.size() / layer_count;
  TensorView part = queries;
  part.shape = queries.shape.subspan(1);
  part.data = queries.data.subspan(layer_idx * layer_bytes, layer_bytes);
  return ReadQueries(shape, part, shape.query_head_count);
}

}  // namespace

absl::StatusOr<IndexDescription> Engine::DescribeIndex(const TenantId& tenant, SequenceRef sequence,
                                                       std::optional<uint32_t> layer,
                                                       std::optional<uint32_t> kv_head) const {
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> found,
                          impl_->registry.Find(tenant, sequence.id));
  if (layer.has_value()) WAVEKV_RETURN_IF_ERROR(ValidateLayer(found->shape(), *layer));
  if (kv_head.has_value()) WAVEKV_RETURN_IF_ERROR(ValidateKvHead(found->shape(), *kv_head));
  WAVEKV_ASSIGN_OR_RETURN(std::vector<LayerSnapshot> snapshots,
                          found->SnapshotAll(sequence.generation));
  std::vector<std::pair<uint32_t, LayerSnapshot>> layers;
  for (uint32_t i = 0; i < snapshots.size(); ++i) {
    if (!layer.has_value() || *layer == i) layers.emplace_back(i, std::move(snapshots[i]));
  }
  IndexDescription description = DescribeLayers(layers, kv_head);
  description.building = found->building();
  return description;
}

absl::StatusOr<Explanation> Engine::Explain(const TenantId& tenant, const LayerQuery& query,
                                            uint32_t kv_head, uint32_t top) const {
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> found,
                          impl_->registry.Find(tenant, query.sequence.id));
  WAVEKV_RETURN_IF_ERROR(ValidateLayer(found->shape(), query.layer));
  WAVEKV_RETURN_IF_ERROR(ValidateKvHead(found->shape(), kv_head));
  if (top > kClustersExplainedMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("explain: top is ", top, ", expected at most ", kClustersExplainedMax));
  }
  WAVEKV_ASSIGN_OR_RETURN(const ZoneBudget budget, BudgetOf(*found, query.layer, query.budget));
  WAVEKV_ASSIGN_OR_RETURN(const LayerSnapshot snapshot,
                          found->Snapshot(query.sequence.generation, query.layer));
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<float> queries,
                          GroupQueries(*found, snapshot, query, kv_head));
  return ExplainHead(impl_->backend.get(), snapshot, kv_head, queries, budget, top);
}

absl::StatusOr<RecallSample> Engine::SampleRecall(const TenantId& tenant, SequenceRef sequence,
                                                  std::span<const uint32_t> layers,
                                                  const TensorView& queries,
                                                  const std::optional<ZoneBudget>& budget) const {
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> found,
                          impl_->registry.Find(tenant, sequence.id));
  const ModelShape& shape = found->shape();
  std::vector<uint32_t> wanted(layers.begin(), layers.end());
  if (wanted.empty()) {
    wanted.resize(shape.layer_count);
    std::iota(wanted.begin(), wanted.end(), 0u);
  }
  if (wanted.size() > shape.layer_count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "recall: ", wanted.size(), " layers named, expected at most ", shape.layer_count));
  }
  RecallSample sample;
  for (size_t i = 0; i < wanted.size(); ++i) {
    const uint32_t layer = wanted[i];
    WAVEKV_RETURN_IF_ERROR(ValidateLayer(shape, layer));
    WAVEKV_ASSIGN_OR_RETURN(const ZoneBudget layer_budget, BudgetOf(*found, layer, budget));
    WAVEKV_ASSIGN_OR_RETURN(const LayerSnapshot snapshot,
                            found->Snapshot(sequence.generation, layer));
    sample.generation = snapshot.generation;
    sample.version = std::max(sample.version, snapshot.version->number());
    QueryVectors vectors = snapshot.last_queries;
    if (!queries.shape.empty()) {
      WAVEKV_ASSIGN_OR_RETURN(vectors, QueriesOfLayer(shape, queries, i, wanted.size()));
    }
    if (vectors.floats == nullptr) {
      sample.layers.push_back({.layer = layer});
      continue;
    }
    WAVEKV_ASSIGN_OR_RETURN(const LayerRecall recall,
                            RecallOfLayer(impl_->backend.get(), &impl_->compute_pool, layer,
                                          snapshot, vectors, layer_budget));
    sample.layers.push_back(recall);
  }
  return sample;
}

}  // namespace wavekv
