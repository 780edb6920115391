// The current device of a thread. Internal to the SDK.
#pragma once

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "gpu/kernels/cuda_status.h"

namespace wavekv::client {

// Makes a device current in this thread while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    status_ = gpu::CudaStatus(cudaGetDevice(&before_), "cudaGetDevice");
    if (status_.ok()) status_ = gpu::CudaStatus(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (status_.ok()) (void)cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const absl::Status& status() const { return status_; }

 private:
  int before_ = 0;
  absl::Status status_;
};

}  // namespace wavekv::client
