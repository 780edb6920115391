#include "storage/base/tensor_bytes.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace wavekv {
std::string ShapeText(std::span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

absl::StatusOr<uint64_t> TensorBytes(DType dtype, std::span<const int64_t> shape) {
  if (shape.size() > kTensorRankMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the shape has ", shape.size(), " dimensions, at most ", kTensorRankMax, " are allowed"));
  }
  int64_t bytes = static_cast<int64_t>(DTypeBytes(dtype));
  bool empty = false;
  bool overflow = false;
  for (const int64_t dimension : shape) {
    if (dimension < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("the shape ", ShapeText(shape), " has a negative dimension"));
    }
    if (dimension == 0) {
      empty = true;
    } else {
      overflow |= __builtin_mul_overflow(bytes, dimension, &bytes);
    }
  }
  if (overflow) {
    return absl::InvalidArgumentError(
        absl::StrCat("the shape ", ShapeText(shape), " has more than 2^63 bytes"));
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

absl::Status CheckTensorData(absl::string_view name, DType dtype, std::span<const int64_t> shape,
                             uint64_t data_bytes) {
  const absl::StatusOr<uint64_t> bytes = TensorBytes(dtype, shape);
  if (!bytes.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", bytes.status().message()));
  }
  if (data_bytes == *bytes) return absl::OkStatus();
  const std::string_view dtype_name = DTypeName(dtype);
  return absl::InvalidArgumentError(absl::StrCat(
      name, ": data has ", data_bytes, " bytes, expected ", *bytes, " for shape ", ShapeText(shape),
      " of ", absl::string_view(dtype_name.data(), dtype_name.size())));
}

}  // namespace wavekv
