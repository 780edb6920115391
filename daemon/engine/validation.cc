#include "daemon/engine/validation.h"

#include <bit>
#include <cstring>
#include <initializer_list>
#include <set>

#include "absl/strings/str_cat.h"
#include "index/backend/compute_backend.h"
#include "index/simd/kernels.h"
#include "storage/base/status_macros.h"
#include "storage/base/tensor_bytes.h"

namespace wavekv {
namespace {

constexpr uint32_t kSegmentTokensMin = 1024;
constexpr uint32_t kSegmentTokensMax = 65536;
constexpr uint32_t kSmallSegmentTokensMin = 128;
constexpr uint32_t kIterationsMax = 100;

absl::string_view Text(std::string_view text) { return {text.data(), text.size()}; }

absl::Status ValidateIndexConfig(const IndexConfig& index, uint32_t layer_count) {
  if (index.segment_tokens < kSegmentTokensMin || index.segment_tokens > kSegmentTokensMax ||
      !std::has_single_bit(index.segment_tokens)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "index: segment_tokens is ", index.segment_tokens, ", expected a power of two from ",
        kSegmentTokensMin, " to ", kSegmentTokensMax));
  }
  if (index.small_segment_tokens < kSmallSegmentTokensMin ||
      index.segment_tokens % index.small_segment_tokens != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "index: small_segment_tokens is ", index.small_segment_tokens, ", expected at least ",
        kSmallSegmentTokensMin, " and a divisor of segment_tokens (", index.segment_tokens, ")"));
  }
  if (index.tokens_per_cluster < 1 || index.tokens_per_cluster > kClusterTokensMax) {
    return absl::InvalidArgumentError(absl::StrCat("index: tokens_per_cluster is ",
                                                   index.tokens_per_cluster, ", expected 1 to ",
                                                   kClusterTokensMax));
  }
  if (index.kmeans_iterations < 1 || index.kmeans_iterations > kIterationsMax) {
    return absl::InvalidArgumentError(absl::StrCat("index: kmeans_iterations is ",
                                                   index.kmeans_iterations, ", expected 1 to ",
                                                   kIterationsMax));
  }
  WAVEKV_RETURN_IF_ERROR(ValidateBudget(index.budget));
  std::set<uint32_t> layers;
  for (const auto& [layer, budget] : index.layer_budgets) {
    if (layer >= layer_count || !layers.insert(layer).second) {
      return absl::InvalidArgumentError(absl::StrCat("index: layer_budgets names layer ", layer,
                                                     ", expected each layer below ", layer_count,
                                                     " at most once"));
    }
    WAVEKV_RETURN_IF_ERROR(ValidateBudget(budget));
  }
  layers.clear();
  for (const uint32_t layer : index.dense_layers) {
    if (layer >= layer_count || !layers.insert(layer).second) {
      return absl::InvalidArgumentError(absl::StrCat("index: dense_layers names layer ", layer,
                                                     ", expected each layer below ", layer_count,
                                                     " at most once"));
    }
  }
  return absl::OkStatus();
}

// `expected` has one entry per axis, -1 where any size from 1 on will do.
absl::Status ValidateTensor(absl::string_view name, const TensorView& tensor, DType dtype,
                            std::initializer_list<int64_t> expected, absl::string_view axes) {
  if (tensor.dtype != dtype) {
    return absl::InvalidArgumentError(absl::StrCat(name, " have dtype ",
                                                   Text(DTypeName(tensor.dtype)), ", expected ",
                                                   Text(DTypeName(dtype))));
  }
  bool matches = tensor.shape.size() == expected.size();
  uint64_t elements = 1;
  for (size_t axis = 0; matches && axis < expected.size(); ++axis) {
    const int64_t size = tensor.shape[axis];
    const int64_t wanted = expected.begin()[axis];
    matches = size >= 1 && (wanted < 0 || size == wanted);
    // Bounds the product: no tensor of 2^48 elements fits a message.
    matches = matches && static_cast<uint64_t>(size) <= (uint64_t{1} << 48) / elements;
    elements *= matches ? static_cast<uint64_t>(size) : 1;
  }
  if (!matches) {
    return absl::InvalidArgumentError(absl::StrCat(name, " have shape ", ShapeText(tensor.shape),
                                                   ", expected ", axes, " = ",
                                                   ShapeText({expected.begin(), expected.size()})));
  }
  if (tensor.data.size() != elements * DTypeBytes(dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, " have ", tensor.data.size(), " bytes, expected ", elements * DTypeBytes(dtype),
        " for shape ", ShapeText(tensor.shape), " of ", Text(DTypeName(dtype))));
  }
  return absl::OkStatus();
}

// Keys or values of a chunk: [layers, tokens, heads, dim] or [layers, heads, tokens, dim].
absl::Status ValidateChunkTensor(absl::string_view name, const TensorView& tensor,
                                 const ModelShape& shape, size_t layer_count, uint32_t dim) {
  const int64_t layers = static_cast<int64_t>(layer_count);
  const int64_t heads = shape.kv_head_count;
  return tensor.layout == Layout::kNHD
             ? ValidateTensor(name, tensor, shape.dtype, {layers, -1, heads, dim},
                              "[layers, tokens, kv_heads, dim] (NHD, -1: any)")
             : ValidateTensor(name, tensor, shape.dtype, {layers, heads, -1, dim},
                              "[layers, kv_heads, tokens, dim] (HND, -1: any)");
}

// Refuses NaN and infinity in one token's rows [kv_heads, dim].
absl::Status CheckFinite(absl::string_view name, const TensorView& tensor, const RowBatch& batch,
                         uint32_t dim) {
  const size_t count = tensor.data.size() / DTypeBytes(tensor.dtype);
  const size_t found = FirstNonFinite(tensor.dtype, tensor.data.data(), count);
  if (found == count) return absl::OkStatus();
  return NotFiniteError(name, batch.layers.front(), batch.range.begin,
                        static_cast<uint32_t>(found / dim), found % dim);
}

void ReadRows(const ModelShape& shape, const TensorView& keys, const TensorView& values,
              RowBatch* batch) {
  const uint64_t tokens = batch->range.size();
  batch->keys =
      TensorRows(keys.data.data(), keys.layout, tokens, shape.kv_head_count, shape.key_bytes());
  batch->values = TensorRows(values.data.data(), values.layout, tokens, shape.kv_head_count,
                             shape.value_bytes());
}

}  // namespace

absl::Status NotFiniteError(absl::string_view name, uint32_t layer, uint64_t position,
                            uint32_t kv_head, size_t element) {
  return absl::InvalidArgumentError(
      absl::StrCat(name, " hold a NaN or an infinity at layer ", layer, ", position ", position,
                   ", KV head ", kv_head, ", element ", element, "; expected finite numbers"));
}

absl::Status ValidateLabelCount(const SequenceSpec& spec, uint64_t segments) {
  const uint64_t most = spec.max_tokens / kSmallSegmentTokensMin + 1;
  if (segments <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("labels of ", segments, " segments, expected at most ", most,
                   ": no segment of the index has fewer than ", kSmallSegmentTokensMin, " tokens"));
}

absl::StatusOr<GivenLabels> ReadLabels(const SequenceSpec& spec, const LabelRange& segment) {
  const uint64_t first = segment.first_position, tokens = segment.token_count;
  if (tokens == 0 || tokens > spec.max_tokens || first > spec.max_tokens - tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("labels: ", tokens, " tokens from position ", first,
                     ", expected one or more that end within max_tokens (", spec.max_tokens, ")"));
  }
  const uint64_t count = uint64_t{spec.shape.kv_head_count} * tokens;
  if (segment.labels.size() != count * sizeof(uint16_t)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "labels of the ", tokens, " tokens from position ", first, " have ", segment.labels.size(),
        " bytes, expected ", count * sizeof(uint16_t), ": 2 for each token and KV head"));
  }
  const uint32_t clusters = ClusterCountFor(segment.token_count, spec.index.tokens_per_cluster);
  std::vector<uint16_t> labels(count);
  std::memcpy(labels.data(), segment.labels.data(), segment.labels.size());
  for (uint64_t i = 0; i < count; ++i) {
    if (labels[i] < clusters) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "labels: position ", first + i % tokens, " of KV head ", i / tokens, " has label ",
        labels[i], ", expected less than ", clusters, ", the clusters of ", tokens, " tokens"));
  }
  return GivenLabels{{first, first + tokens}, std::move(labels)};
}

absl::Status ValidateLayer(const ModelShape& shape, uint32_t layer) {
  if (layer < shape.layer_count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("layer is ", layer, ", expected less than ", shape.layer_count));
}

absl::Status ValidateSpec(const SequenceSpec& spec, uint64_t tokens_max) {
  WAVEKV_RETURN_IF_ERROR(ValidateModelShape(spec.shape));
  const uint64_t total_heads =
      spec.total_kv_head_count == 0 ? spec.shape.kv_head_count : spec.total_kv_head_count;
  if (uint64_t{spec.first_kv_head} + spec.shape.kv_head_count > total_heads) {
    return absl::InvalidArgumentError(
        absl::StrCat("head range: KV heads ", spec.first_kv_head, " to ",
                     uint64_t{spec.first_kv_head} + spec.shape.kv_head_count - 1,
                     ", expected below ", total_heads));
  }
  if (spec.max_tokens < 1 || spec.max_tokens > tokens_max) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_tokens is ", spec.max_tokens, ", expected 1 to ", tokens_max, " (--tokens_max)"));
  }
  if (spec.label.size() > kLabelBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("label has ", spec.label.size(), " bytes, expected at most ", kLabelBytesMax));
  }
  return ValidateIndexConfig(spec.index, spec.shape.layer_count);
}

absl::StatusOr<RowBatch> ReadInsertChunk(const ModelShape& shape, const InsertChunk& chunk) {
  RowBatch batch;
  batch.layers.assign(chunk.layers.begin(), chunk.layers.end());
  if (batch.layers.empty()) {
    return absl::InvalidArgumentError("the chunk names no layer, expected at least one");
  }
  if (batch.layers.size() > shape.layer_count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the chunk names ", batch.layers.size(), " layers, expected at most ", shape.layer_count));
  }
  std::set<uint32_t> seen;
  for (const uint32_t layer : batch.layers) {
    WAVEKV_RETURN_IF_ERROR(ValidateLayer(shape, layer));
    if (!seen.insert(layer).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("the chunk names layer ", layer, " twice, expected each layer once"));
    }
  }
  WAVEKV_RETURN_IF_ERROR(
      ValidateChunkTensor("keys", chunk.keys, shape, batch.layers.size(), shape.key_dim));
  WAVEKV_RETURN_IF_ERROR(
      ValidateChunkTensor("values", chunk.values, shape, batch.layers.size(), shape.value_dim));
  const auto token_count = [](const TensorView& tensor) {
    return static_cast<uint64_t>(tensor.shape[tensor.layout == Layout::kNHD ? 1 : 2]);
  };
  const uint64_t tokens = token_count(chunk.keys);
  if (token_count(chunk.values) != tokens) {
    return absl::InvalidArgumentError(absl::StrCat("values hold ", token_count(chunk.values),
                                                   " tokens, expected ", tokens, " as the keys"));
  }
  if (chunk.first_position > UINT64_MAX - tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_position is ", chunk.first_position, ", expected a token position"));
  }
  batch.range = {chunk.first_position, chunk.first_position + tokens};
  ReadRows(shape, chunk.keys, chunk.values, &batch);
  return batch;
}

absl::StatusOr<RowBatch> ReadAppend(const ModelShape& shape, const AttendStep& step) {
  if (!step.append_keys.has_value() || !step.append_values.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "append has ", step.append_keys.has_value() ? "keys and no values" : "values and no keys",
        ", expected both or neither"));
  }
  const TensorView& keys = *step.append_keys;
  const TensorView& values = *step.append_values;
  const int64_t heads = shape.kv_head_count;
  WAVEKV_RETURN_IF_ERROR(ValidateTensor("append keys", keys, shape.dtype, {heads, shape.key_dim},
                                        "[kv_heads, key_dim]"));
  WAVEKV_RETURN_IF_ERROR(ValidateTensor("append values", values, shape.dtype,
                                        {heads, shape.value_dim}, "[kv_heads, value_dim]"));
  if (step.append_position == UINT64_MAX) {
    return absl::InvalidArgumentError("append_position is 2^64 - 1, expected a token position");
  }
  RowBatch batch;
  batch.range = {step.append_position, step.append_position + 1};
  batch.layers = {step.query.layer};
  WAVEKV_RETURN_IF_ERROR(CheckFinite("keys", keys, batch, shape.key_dim));
  WAVEKV_RETURN_IF_ERROR(CheckFinite("values", values, batch, shape.value_dim));
  ReadRows(shape, keys, values, &batch);
  batch.finite = true;
  return batch;
}

absl::StatusOr<QueryVectors> ReadQueries(const ModelShape& shape, const TensorView& queries,
                                         uint32_t head_count) {
  WAVEKV_RETURN_IF_ERROR(ValidateTensor("queries", queries, queries.dtype,
                                        {head_count, shape.key_dim}, "[query_heads, key_dim]"));
  const size_t count = size_t{head_count} * shape.key_dim;
  const size_t found = FirstNonFinite(queries.dtype, queries.data.data(), count);
  if (found != count) {
    return absl::InvalidArgumentError(
        absl::StrCat("queries hold a NaN or an infinity at query head ", found / shape.key_dim,
                     ", element ", found % shape.key_dim, "; expected finite numbers"));
  }
  auto floats = std::make_shared_for_overwrite<float[]>(count);
  simd::ActiveKernels().to_float(queries.dtype, queries.data.data(), count, floats.get());
  return QueryVectors{.floats = std::move(floats), .count = count};
}

}  // namespace wavekv
