#include "proto/rpc/tensor_wire.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

absl::string_view Absl(std::string_view text) { return {text.data(), text.size()}; }

std::span<const int64_t> Shape(const v1::Tensor& tensor) {
  return {tensor.shape().data(), static_cast<size_t>(tensor.shape_size())};
}

}  // namespace

absl::StatusOr<DType> FromWireDType(v1::DType dtype, std::string_view name) {
  switch (dtype) {
    case v1::DTYPE_F32:
      return DType::kF32;
    case v1::DTYPE_F16:
      return DType::kF16;
    case v1::DTYPE_BF16:
      return DType::kBF16;
    default:
      break;
  }
  return absl::InvalidArgumentError(absl::StrCat(Absl(name), ": dtype is ", static_cast<int>(dtype),
                                                 ", expected F32 (1), F16 (2) or BF16 (3)"));
}

v1::DType ToWireDType(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return v1::DTYPE_F32;
    case DType::kF16:
      return v1::DTYPE_F16;
    case DType::kBF16:
      return v1::DTYPE_BF16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

absl::Status CheckWireTensor(const v1::Tensor& tensor, std::string_view name) {
  WAVEKV_ASSIGN_OR_RETURN(const DType dtype, FromWireDType(tensor.dtype(), name));
  if (!v1::Layout_IsValid(tensor.layout())) {
    return absl::InvalidArgumentError(absl::StrCat(Absl(name), ": layout is ",
                                                   static_cast<int>(tensor.layout()),
                                                   ", expected NHD (1) or HND (2)"));
  }
  return CheckTensorData(Absl(name), dtype, Shape(tensor), tensor.data().size());
}

void FillWireTensor(DType dtype, std::span<const int64_t> shape, const void* data,
                    v1::Tensor* tensor) {
  const absl::StatusOr<uint64_t> bytes = TensorBytes(dtype, shape);
  WAVEKV_CHECK(bytes.ok(), "the shape of a tensor of our own overflows");
  tensor->set_dtype(ToWireDType(dtype));
  tensor->mutable_shape()->Assign(shape.begin(), shape.end());
  tensor->set_layout(v1::LAYOUT_NHD);
  if (*bytes == 0) {
    tensor->clear_data();
  } else {
    tensor->set_data(data, *bytes);
  }
}

}  // namespace wavekv
