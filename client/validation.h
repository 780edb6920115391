// What can be known to be wrong before anything is sent: shapes, dtypes, layers. Pure functions.
// Internal to the SDK.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/types.h"

namespace wavekv::client {

// The axes of an Insert: keys are [layers, tokens, kv_heads, key_dim] or, HND,
// [layers, kv_heads, tokens, key_dim]; values likewise.
struct InsertExtent {
  uint32_t layers = 0;
  uint64_t tokens = 0;
};

// InvalidArgument with the expected and the found shape or dtype; the extent otherwise. The layer
// axis may be missing when `layers` names one layer. Zero tokens are refused.
absl::StatusOr<InsertExtent> CheckInsert(const ModelShape& shape, std::span<const uint32_t> layers,
                                         const Tensor& keys, const Tensor& values);

// Queries are [query_heads, key_dim] of any dtype.
absl::Status CheckQueries(const ModelShape& shape, uint32_t layer, const Tensor& queries);

// Both of the new token's tensors or none: [kv_heads, key_dim] and [kv_heads, value_dim] of the
// sequence's dtype.
absl::Status CheckAppend(const ModelShape& shape, const std::optional<Tensor>& keys,
                         const std::optional<Tensor>& values);

absl::Status CheckLayer(const ModelShape& shape, uint32_t layer);

// Ratios, coverages and estimate ratios lie in 0 ... 1; an error bound is not negative; a count of
// clusters is a whole number below 2^32.
absl::Status CheckBudget(const Budget& budget);

}  // namespace wavekv::client
