#include "client/python/src/core/arrays.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>

#include "client/python/src/core/dlpack.h"

namespace wavekv::python {
namespace py = pybind11;
namespace {

constexpr int kRankMax = 4;

DType NumpyDType(const py::dtype& dtype, const char* what) {
  const auto name = py::cast<std::string>(dtype.attr("name"));
  if (name == "float32") return DType::kF32;
  if (name == "float16") return DType::kF16;
  if (name == "bfloat16") return DType::kBF16;
  throw py::type_error(std::string(what) + ": dtype is " + name +
                       ", expected float32, float16 or ml_dtypes.bfloat16");
}

// What the protocol carries: little endian, as every machine that this is built for is itself.
static_assert(std::endian::native == std::endian::little);

BorrowedTensor BorrowNumpy(const py::object& object, const char* what) {
  py::object array = object;
  BorrowedTensor borrowed;
  const py::object dtype = array.attr("dtype");
  borrowed.tensor.dtype = NumpyDType(py::cast<py::dtype>(dtype), what);
  // The name of a dtype says nothing of its byte order: ">f4" is a float32, too.
  const bool native = py::cast<bool>(dtype.attr("isnative"));
  if (!native || !py::cast<bool>(array.attr("flags").attr("c_contiguous"))) {
    array = py::module_::import("numpy").attr("ascontiguousarray")(
        array, native ? dtype : dtype.attr("newbyteorder")("="));
  }
  const auto view = py::cast<py::array>(array);
  borrowed.tensor.shape.assign(view.shape(), view.shape() + view.ndim());
  borrowed.tensor.data = view.data();
  borrowed.owner = view;
  return borrowed;
}

// Copies a strided tensor into a compact row-major buffer.
void CopyStrided(const DlTensor& tensor, int axis, const std::byte* source, size_t element_bytes,
                 std::byte** target) {
  if (axis == tensor.ndim) {
    std::memcpy(*target, source, element_bytes);
    *target += element_bytes;
    return;
  }
  for (int64_t i = 0; i < tensor.shape[axis]; ++i) {
    CopyStrided(tensor, axis + 1, source + i * tensor.strides[axis] * element_bytes, element_bytes,
                target);
  }
}

BorrowedTensor BorrowDlPack(const py::object& object, const char* what) {
  py::object capsule = object.attr("__dlpack__")();
  const DlTensor& tensor = TensorIn(capsule);
  if (tensor.device.device_type != kDlCpu && tensor.device.device_type != kDlCudaHost) {
    RefuseValue(what, "lies on DLPack device type " + std::to_string(tensor.device.device_type) +
                          ", expected host memory (1 or 3)");
  }
  if (tensor.ndim < 0 || tensor.ndim > kRankMax) {
    RefuseValue(what, "has rank " + std::to_string(tensor.ndim) + ", expected at most 4");
  }
  BorrowedTensor borrowed;
  borrowed.tensor.dtype = DlPackDType(tensor.dtype, what);
  borrowed.tensor.shape.assign(tensor.shape, tensor.shape + tensor.ndim);
  const auto* data = static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
  if (IsCompact(tensor)) {
    borrowed.tensor.data = data;
    borrowed.owner = capsule;  // Not consumed: the capsule's own destructor releases the tensor.
    return borrowed;
  }
  py::bytearray copy(std::string(borrowed.tensor.bytes(), '\0'));
  auto* target = reinterpret_cast<std::byte*>(PyByteArray_AsString(copy.ptr()));
  borrowed.tensor.data = target;
  CopyStrided(tensor, 0, data, DTypeBytes(borrowed.tensor.dtype), &target);
  borrowed.owner = copy;
  return borrowed;
}

}  // namespace

BorrowedTensor Borrow(const py::object& array, const char* what) {
  if (py::isinstance<py::array>(array)) return BorrowNumpy(array, what);
  if (py::hasattr(array, "__dlpack__")) return BorrowDlPack(array, what);
  throw py::type_error(std::string(what) + ": is a " +
                       py::cast<std::string>(py::type::of(array).attr("__name__")) +
                       ", expected a numpy array or an object with __dlpack__");
}

py::array_t<float> ToNumpy(const std::vector<float>& data, std::vector<int64_t> shape) {
  py::array_t<float> array(std::move(shape));
  if (static_cast<size_t>(array.size()) != data.size()) {
    throw py::value_error("reply holds " + std::to_string(data.size()) + " values, expected " +
                          std::to_string(array.size()));
  }
  if (!data.empty()) std::memcpy(array.mutable_data(), data.data(), data.size() * sizeof(float));
  return array;
}

}  // namespace wavekv::python
