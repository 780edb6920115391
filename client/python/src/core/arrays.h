// Tensors of Python as borrowed tensors of the SDK, without a copy.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "client/types.h"

namespace wavekv::python {

// A tensor borrowed from a Python object, which it keeps alive. Construct and destroy with the GIL.
struct BorrowedTensor {
  client::Tensor tensor;
  pybind11::object owner;
};

// Accepts a numpy array of float32, float16 or ml_dtypes.bfloat16, or an object with __dlpack__ on
// the CPU. Row-major arrays are borrowed; any other layout or byte order is copied into one. `what`
// names the argument in errors. Throws pybind11::type_error or value_error saying what was expected
// and found.
BorrowedTensor Borrow(const pybind11::object& array, const char* what);

// A new numpy array of float32 that holds a copy of `data`.
pybind11::array_t<float> ToNumpy(const std::vector<float>& data, std::vector<int64_t> shape);

}  // namespace wavekv::python
