// The DLPack 0.x ABI (dmlc/dlpack, dlpack.h): what `__dlpack__` puts into its capsule.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "storage/base/dtype.h"

namespace wavekv::python {

struct DlDevice {
  int32_t device_type;
  int32_t device_id;
};
struct DlDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;  // In elements; null: compact row-major.
  uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* manager_context;
  void (*deleter)(DlManagedTensor*);
};
inline constexpr int32_t kDlCpu = 1;
inline constexpr int32_t kDlCuda = 2;
inline constexpr int32_t kDlCudaHost = 3;
inline constexpr uint8_t kDlFloat = 2;
inline constexpr uint8_t kDlBfloat = 4;

// Throws an error that names the argument.
[[noreturn]] inline void RefuseValue(const char* what, const std::string& text) {
  throw pybind11::value_error(std::string(what) + ": " + text);
}

inline bool IsCompact(const DlTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t expected = 1;
  for (int32_t axis = tensor.ndim - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != expected) return false;
    expected *= tensor.shape[axis];
  }
  return true;
}

// Throws pybind11::type_error for what WaveKV does not take.
inline DType DlPackDType(DlDataType dtype, const char* what) {
  if (dtype.lanes == 1) {
    if (dtype.code == kDlFloat && dtype.bits == 32) return DType::kF32;
    if (dtype.code == kDlFloat && dtype.bits == 16) return DType::kF16;
    if (dtype.code == kDlBfloat && dtype.bits == 16) return DType::kBF16;
  }
  throw pybind11::type_error(std::string(what) + ": DLPack type code " +
                             std::to_string(dtype.code) + " with " + std::to_string(dtype.bits) +
                             " bits, expected float32, float16 or bfloat16");
}

// The tensor in a capsule that nobody has consumed; the capsule keeps it.
inline const DlTensor& TensorIn(const pybind11::object& capsule) {
  auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  if (managed == nullptr) throw pybind11::error_already_set();
  return managed->tensor;
}

}  // namespace wavekv::python
