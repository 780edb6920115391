#include "client/gpu/host_copier.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>

#include "client/gpu/device_guard.h"
#include "gpu/kernels/cuda_status.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
absl::StatusOr<std::unique_ptr<HostCopier>> HostCopier::Create() {
  WAVEKV_ASSIGN_OR_RETURN(auto staging, gpu::PinnedArray<char>::Make(kStagingBytes));
  return std::unique_ptr<HostCopier>(new HostCopier(std::move(staging)));
}

absl::Status HostCopier::Copy(int device, const void* source, size_t bytes, void* target,
                              CudaStream stream) {
  MutexLock lock(&mutex_);
  const DeviceGuard guard(device);
  WAVEKV_RETURN_IF_ERROR(guard.status());
  for (size_t done = 0; done < bytes;) {
    const size_t part = std::min(kStagingBytes, bytes - done);
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(staging_.data(),
                                                static_cast<const char*>(source) + done, part,
                                                cudaMemcpyDeviceToHost, stream));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    std::memcpy(static_cast<char*>(target) + done, staging_.data(), part);
    done += part;
  }
  return absl::OkStatus();
}

}  // namespace wavekv::client
