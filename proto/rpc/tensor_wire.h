// Checks and conversions of wavekv.v1.Tensor, the same on both sides of the wire.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/dtype.h"
#include "storage/base/tensor_bytes.h"
#include "wavekv/v1/types.pb.h"

namespace wavekv {

// InvalidArgument for DTYPE_UNSPECIFIED and for values of a newer protocol; `name` says whose.
absl::StatusOr<DType> FromWireDType(v1::DType dtype, std::string_view name);
v1::DType ToWireDType(DType dtype);

// That dtype, layout and shape are known and sane, and that `data` has exactly the bytes they call
// for. InvalidArgument names the tensor, what was expected and what was found.
absl::Status CheckWireTensor(const v1::Tensor& tensor, std::string_view name);

// Copies `data` into a tensor. `data` has exactly the product of the shape elements.
void FillWireTensor(DType dtype, std::span<const int64_t> shape, const void* data,
                    v1::Tensor* tensor);

}  // namespace wavekv
