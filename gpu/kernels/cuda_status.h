// CUDA's error codes as absl::Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace wavekv::gpu {

// OK, ResourceExhausted when memory is short, otherwise Unavailable; the text names the call and
// CUDA's own words.
inline absl::Status CudaStatus(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string text =
      absl::StrCat(call, ": ", cudaGetErrorName(error), " (", cudaGetErrorString(error), ")");
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(text);
  return absl::UnavailableError(text);
}

}  // namespace wavekv::gpu

// Returns from the enclosing function when a CUDA call fails.
#define WAVEKV_CUDA_RETURN_IF_ERROR(call)                                 \
  do {                                                                    \
    absl::Status wavekv_cuda_ = ::wavekv::gpu::CudaStatus((call), #call); \
    if (!wavekv_cuda_.ok()) return wavekv_cuda_;                          \
  } while (false)
