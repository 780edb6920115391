// The attention geometry of a model as one sequence holds it, and its limits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "storage/base/dtype.h"

namespace wavekv {

inline constexpr uint32_t kLayersMax = 1024;
inline constexpr uint32_t kHeadsMax = 1024;
inline constexpr uint32_t kHeadDimMin = 32;
inline constexpr uint32_t kHeadDimMax = 256;

struct ModelShape {
  uint32_t layer_count = 0;
  uint32_t query_head_count = 0;  // A multiple of kv_head_count.
  uint32_t kv_head_count = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  DType dtype = DType::kBF16;
  float softmax_scale = 0;  // Multiplies q.k.
  std::string model_id;

  uint32_t group_size() const { return query_head_count / kv_head_count; }
  size_t key_bytes() const { return key_dim * DTypeBytes(dtype); }      // One head's row.
  size_t value_bytes() const { return value_dim * DTypeBytes(dtype); }  // One head's row.
  // K and V of one token of one layer, all heads.
  size_t token_bytes() const { return kv_head_count * (key_bytes() + value_bytes()); }

  friend bool operator==(const ModelShape&, const ModelShape&) = default;
};

// InvalidArgument that names the field, what was found and what is allowed.
absl::Status ValidateModelShape(const ModelShape& shape);

}  // namespace wavekv
