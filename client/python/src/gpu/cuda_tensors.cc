#include "client/python/src/gpu/cuda_tensors.h"

#include <string>

#include "client/python/src/core/dlpack.h"

namespace wavekv::python {
namespace py = pybind11;
namespace {

constexpr int kRankMax = 4;
// DLPack's number of the legacy default stream, whose handle is 0.
constexpr uintptr_t kDlLegacyStream = 1;

std::string Text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

void CheckDeviceType(int32_t type, const char* what) {
  if (type == kDlCuda) return;
  const bool host = type == kDlCpu || type == kDlCudaHost;
  RefuseValue(what, std::string(host ? "lies in host memory" : "lies elsewhere") +
                        " (DLPack device type " + std::to_string(type) +
                        "), expected a tensor on a GPU (2)");
}

}  // namespace

size_t CudaTensor::bytes() const {
  size_t count = DTypeBytes(dtype);
  for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
  return count;
}

client::CudaStream StreamOf(const py::object& stream) {
  const py::object handle =
      py::hasattr(stream, "cuda_stream") ? stream.attr("cuda_stream") : stream;
  if (!py::isinstance<py::int_>(handle)) {
    throw py::type_error("stream: is a " +
                         py::cast<std::string>(py::type::of(stream).attr("__name__")) +
                         ", expected an integer handle or an object with cuda_stream");
  }
  return reinterpret_cast<client::CudaStream>(py::cast<uintptr_t>(handle));
}

CudaTensor BorrowStrided(const py::object& object, const char* what, client::CudaStream stream) {
  if (!py::hasattr(object, "__dlpack__") || !py::hasattr(object, "__dlpack_device__")) {
    throw py::type_error(std::string(what) + ": is a " +
                         py::cast<std::string>(py::type::of(object).attr("__name__")) +
                         ", expected an object with __dlpack__ and __dlpack_device__");
  }
  // Asked first: who lies elsewhere knows nothing of streams.
  const auto device = py::cast<py::tuple>(object.attr("__dlpack_device__")());
  CheckDeviceType(py::cast<int32_t>(py::int_(device[0])), what);
  const auto handle = reinterpret_cast<uintptr_t>(stream);
  CudaTensor borrowed;
  borrowed.owner =
      object.attr("__dlpack__")(py::arg("stream") = handle == 0 ? kDlLegacyStream : handle);
  const DlTensor& tensor = TensorIn(borrowed.owner);
  CheckDeviceType(tensor.device.device_type, what);
  if (tensor.ndim < 0 || tensor.ndim > kRankMax) {
    RefuseValue(what, "has rank " + std::to_string(tensor.ndim) + ", expected at most 4");
  }
  borrowed.dtype = DlPackDType(tensor.dtype, what);
  borrowed.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  borrowed.strides.resize(borrowed.shape.size());
  int64_t dense = 1;
  for (size_t axis = borrowed.shape.size(); axis-- > 0; dense *= borrowed.shape[axis]) {
    borrowed.strides[axis] = tensor.strides == nullptr ? dense : tensor.strides[axis];
  }
  borrowed.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  borrowed.device = tensor.device.device_id;
  return borrowed;
}

CudaTensor BorrowCuda(const py::object& object, const char* what, client::CudaStream stream) {
  CudaTensor borrowed = BorrowStrided(object, what, stream);
  if (!IsCompact(TensorIn(borrowed.owner))) {
    RefuseValue(what, "of shape " + Text(borrowed.shape) +
                          " is not dense and row-major; pass a contiguous copy");
  }
  return borrowed;
}

void Expect(const CudaTensor& tensor, const char* what, DType dtype,
            const std::vector<int64_t>& shape, int device) {
  if (tensor.dtype != dtype) {
    throw py::type_error(std::string(what) + ": dtype is " + std::string(DTypeName(tensor.dtype)) +
                         ", expected " + std::string(DTypeName(dtype)));
  }
  if (tensor.shape != shape) {
    RefuseValue(what, "shape is " + Text(tensor.shape) + ", expected " + Text(shape));
  }
  if (tensor.device != device) {
    RefuseValue(what, "lies on device " + std::to_string(tensor.device) + ", expected " +
                          std::to_string(device) + ", where the batch lies");
  }
}

}  // namespace wavekv::python
