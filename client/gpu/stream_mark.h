// A moment in a stream of the device. Internal to the SDK.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "absl/status/status.h"
#include "gpu/kernels/cuda_status.h"

namespace wavekv::client {

// Until it is set, and where that fails, it is of no moment: nobody knows when. Movable; used by
// one thread at a time.
class StreamMark {
 public:
  StreamMark() = default;
  StreamMark(StreamMark&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  StreamMark& operator=(StreamMark&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }
  ~StreamMark() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
  }

  // The moment when all that is in `stream` now, a stream of the current device, has run.
  // Unavailable: CUDA failed, with its own words.
  absl::Status Set(cudaStream_t stream) {
    if (event_ == nullptr) {
      // Who waits for it lets the CPU go.
      WAVEKV_CUDA_RETURN_IF_ERROR(
          cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync));
    }
    const absl::Status set = gpu::CudaStatus(cudaEventRecord(event_, stream), "cudaEventRecord");
    if (!set.ok()) *this = StreamMark();
    return set;
  }

  // Whether the device has come so far. Not where it failed on the way.
  bool Reached() const { return Query() == cudaSuccess; }
  // Whether Wait would wait.
  bool Ahead() const { return Query() == cudaErrorNotReady; }
  // Until the device has come so far. Unavailable: it failed on the way, and runs nothing any more.
  absl::Status Wait() const {
    if (event_ == nullptr) return absl::OkStatus();
    return gpu::CudaStatus(cudaEventSynchronize(event_), "cudaEventSynchronize");
  }

 private:
  cudaError_t Query() const {
    if (event_ == nullptr) return cudaErrorInvalidResourceHandle;
    const cudaError_t passed = cudaEventQuery(event_);
    // Not an error, but kept as the last one: whoever launches next would take it for its own.
    if (passed == cudaErrorNotReady) (void)cudaGetLastError();
    return passed;
  }

  cudaEvent_t event_ = nullptr;
};

}  // namespace wavekv::client
