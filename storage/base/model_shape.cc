#include "storage/base/model_shape.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace wavekv {
namespace {

absl::Status CheckRange(const char* name, uint32_t value, uint32_t low, uint32_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("model shape: ", name, " is ", value, ", expected ", low, " to ", high));
}

}  // namespace

absl::Status ValidateModelShape(const ModelShape& shape) {
  for (const absl::Status& status : {
           CheckRange("layer_count", shape.layer_count, 1, kLayersMax),
           CheckRange("query_head_count", shape.query_head_count, 1, kHeadsMax),
           CheckRange("kv_head_count", shape.kv_head_count, 1, kHeadsMax),
           CheckRange("key_dim", shape.key_dim, kHeadDimMin, kHeadDimMax),
           CheckRange("value_dim", shape.value_dim, kHeadDimMin, kHeadDimMax),
       }) {
    if (!status.ok()) return status;
  }
  if (shape.query_head_count % shape.kv_head_count != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("model shape: query_head_count is ", shape.query_head_count,
                     ", expected a multiple of kv_head_count (", shape.kv_head_count, ")"));
  }
  if (!std::isfinite(shape.softmax_scale) || shape.softmax_scale <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("model shape: softmax_scale is ",
                                                   shape.softmax_scale,
                                                   ", expected a finite number above 0"));
  }
  if (shape.model_id.size() > 256) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model shape: model_id has ", shape.model_id.size(), " bytes, expected at most 256"));
  }
  return absl::OkStatus();
}

}  // namespace wavekv
