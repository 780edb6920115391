// The size of a tensor from outside, checked before anything is done with it.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/base/dtype.h"

namespace wavekv {

inline constexpr int kTensorRankMax = 8;

// product(shape) * element size. InvalidArgument: rank over kTensorRankMax, a negative dimension,
// or a product beyond 63 bits. The empty shape is a scalar.
absl::StatusOr<uint64_t> TensorBytes(DType dtype, std::span<const int64_t> shape);

// "[2, 8, 64]"
std::string ShapeText(std::span<const int64_t> shape);

// That `data_bytes` is what the shape calls for. InvalidArgument names the tensor, what was
// expected and what was found.
absl::Status CheckTensorData(absl::string_view name, DType dtype, std::span<const int64_t> shape,
                             uint64_t data_bytes);

}  // namespace wavekv
