// Tensors of Python that lie on a GPU, through DLPack: no tensor library is named.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "client/gpu/resident_batch.h"
#include "storage/base/dtype.h"

namespace wavekv::python {

// A tensor borrowed from a Python object, which it keeps alive: dense and row-major, unless it was
// asked for with its strides. Construct and destroy with the GIL.
struct CudaTensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // In elements.
  int device = 0;
  pybind11::object owner;

  size_t bytes() const;
};

// The stream that an integer handle, or an object with `cuda_stream` as torch's, stands for. Throws
// pybind11::type_error.
client::CudaStream StreamOf(const pybind11::object& stream);

// Asks `object` for its memory, ready to be used in `stream`. Throws pybind11::type_error or
// value_error that names the argument `what`: it speaks no DLPack, does not lie on a GPU, is not
// dense, or is of another type than float32, float16 or bfloat16.
CudaTensor BorrowCuda(const pybind11::object& object, const char* what, client::CudaStream stream);

// The same, of any strides.
CudaTensor BorrowStrided(const pybind11::object& object, const char* what,
                         client::CudaStream stream);

// Throws what says which of dtype, shape and device differs, found and expected.
void Expect(const CudaTensor& tensor, const char* what, DType dtype,
            const std::vector<int64_t>& shape, int device);

}  // namespace wavekv::python
