#include "client/validation.h"

#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "storage/base/tensor_bytes.h"

namespace wavekv::client {
namespace {

absl::string_view Name(DType dtype) {
  const std::string_view name = DTypeName(dtype);
  return absl::string_view(name.data(), name.size());
}

absl::Status CheckDType(const char* what, DType expected, DType found) {
  if (expected == found) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": expected dtype ", Name(expected),
                                                 " as the sequence stores, found ", Name(found)));
}

absl::Status CheckData(const char* what, const Tensor& tensor) {
  if (tensor.data != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(what, ": data is null"));
}

absl::Status CheckMatrix(const char* what, const Tensor& tensor, uint32_t rows,
                         const char* row_name, uint32_t columns, const char* column_name) {
  if (tensor.shape.size() == 2 && tensor.shape[0] == rows && tensor.shape[1] == columns) {
    return CheckData(what, tensor);
  }
  return absl::InvalidArgumentError(absl::StrCat(what, ": expected shape [", row_name, "=", rows,
                                                 ", ", column_name, "=", columns, "], found ",
                                                 ShapeText(tensor.shape)));
}

// Checks one of keys and values; returns its token count.
absl::StatusOr<uint64_t> CheckRows(const char* what, const ModelShape& shape, uint64_t layers,
                                   uint32_t dim, const char* dim_name, const Tensor& tensor) {
  std::vector<int64_t> extents = tensor.shape;
  if (extents.size() == 3 && layers == 1) extents.insert(extents.begin(), 1);
  const size_t token_axis = tensor.layout == Layout::kNHD ? 1 : 2;
  const size_t head_axis = tensor.layout == Layout::kNHD ? 2 : 1;
  const bool fits = extents.size() == 4 && extents[0] == static_cast<int64_t>(layers) &&
                    extents[head_axis] == shape.kv_head_count && extents[3] == dim &&
                    extents[token_axis] > 0;
  if (!fits) {
    const std::string heads = absl::StrCat("kv_heads=", shape.kv_head_count);
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": expected shape [layers=", layers, ", ",
                     tensor.layout == Layout::kNHD ? absl::StrCat("tokens>0, ", heads)
                                                   : absl::StrCat(heads, ", tokens>0"),
                     ", ", dim_name, "=", dim, "] (", tensor.layout == Layout::kNHD ? "NHD" : "HND",
                     "), found ", ShapeText(tensor.shape)));
  }
  WAVEKV_RETURN_IF_ERROR(CheckDType(what, shape.dtype, tensor.dtype));
  WAVEKV_RETURN_IF_ERROR(CheckData(what, tensor));
  return static_cast<uint64_t>(extents[token_axis]);
}

}  // namespace

absl::Status CheckLayer(const ModelShape& shape, uint32_t layer) {
  if (layer < shape.layer_count) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("layer: expected 0 ... ", shape.layer_count - 1, ", found ", layer));
}

absl::StatusOr<InsertExtent> CheckInsert(const ModelShape& shape, std::span<const uint32_t> layers,
                                         const Tensor& keys, const Tensor& values) {
  if (layers.empty())
    return absl::InvalidArgumentError("layers: expected at least one, found none");
  std::vector<bool> named(shape.layer_count, false);
  for (const uint32_t layer : layers) {
    WAVEKV_RETURN_IF_ERROR(CheckLayer(shape, layer));
    if (named[layer]) {
      return absl::InvalidArgumentError(absl::StrCat("layers: layer ", layer, " is named twice"));
    }
    named[layer] = true;
  }
  WAVEKV_ASSIGN_OR_RETURN(const uint64_t key_tokens,
                          CheckRows("keys", shape, layers.size(), shape.key_dim, "key_dim", keys));
  WAVEKV_ASSIGN_OR_RETURN(
      const uint64_t value_tokens,
      CheckRows("values", shape, layers.size(), shape.value_dim, "value_dim", values));
  if (key_tokens != value_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("values: expected ", key_tokens, " tokens as in keys, found ", value_tokens));
  }
  return InsertExtent{.layers = static_cast<uint32_t>(layers.size()), .tokens = key_tokens};
}

absl::Status CheckQueries(const ModelShape& shape, uint32_t layer, const Tensor& queries) {
  WAVEKV_RETURN_IF_ERROR(CheckLayer(shape, layer));
  return CheckMatrix("queries", queries, shape.query_head_count, "query_heads", shape.key_dim,
                     "key_dim");
}

absl::Status CheckAppend(const ModelShape& shape, const std::optional<Tensor>& keys,
                         const std::optional<Tensor>& values) {
  if (keys.has_value() != values.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("append_keys and append_values go together, found only ",
                     keys.has_value() ? "append_keys" : "append_values"));
  }
  if (!keys.has_value()) return absl::OkStatus();
  WAVEKV_RETURN_IF_ERROR(
      CheckMatrix("append_keys", *keys, shape.kv_head_count, "kv_heads", shape.key_dim, "key_dim"));
  WAVEKV_RETURN_IF_ERROR(CheckMatrix("append_values", *values, shape.kv_head_count, "kv_heads",
                                     shape.value_dim, "value_dim"));
  WAVEKV_RETURN_IF_ERROR(CheckDType("append_keys", shape.dtype, keys->dtype));
  return CheckDType("append_values", shape.dtype, values->dtype);
}

absl::Status CheckBudget(const Budget& budget) {
  const bool is_share =
      budget.kind == Budget::Kind::kRatio || budget.kind == Budget::Kind::kCoverage;
  if (is_share && !(budget.value >= 0 && budget.value <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat(budget.kind == Budget::Kind::kRatio ? "budget ratio" : "budget coverage",
                     ": expected 0 ... 1, found ", budget.value));
  }
  if (budget.kind == Budget::Kind::kClusters &&
      !(budget.value >= 0 && budget.value < 4294967296.0 &&
        std::floor(budget.value) == budget.value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("budget clusters: expected a whole number below 2^32, found ", budget.value));
  }
  if (budget.kind == Budget::Kind::kError && !(budget.value >= 0 && std::isfinite(budget.value))) {
    return absl::InvalidArgumentError(
        absl::StrCat("budget error: expected a finite bound >= 0, found ", budget.value));
  }
  if (!(budget.estimate_ratio >= 0 && budget.estimate_ratio <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("budget estimate_ratio: expected 0 ... 1, found ", budget.estimate_ratio));
  }
  if (budget.sketch_clusters > kSketchClustersMax) {
    return absl::InvalidArgumentError(absl::StrCat("budget sketch_clusters: expected 0 ... ",
                                                   kSketchClustersMax, ", found ",
                                                   budget.sketch_clusters));
  }
  return absl::OkStatus();
}

}  // namespace wavekv::client
