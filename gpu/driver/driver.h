// The CUDA driver, loaded when it is first needed.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gpu/driver/cuda_api.h"

namespace wavekv {

// The oldest driver with everything that is called: CUDA 12.0, as the driver counts.
inline constexpr int kCudaVersionMin = 12'000;

// Thread-safe. Stays loaded until the process ends: the driver has threads of its own.
class CudaDriver {
 public:
  // Loads `library` and initialises the driver; makes no context. FailedPrecondition, with the
  // cure: there is no driver, it is too old, or it finds no GPU.
  static absl::StatusOr<std::shared_ptr<const CudaDriver>> Load(const std::string& library);
  // NVIDIA's, the same for every caller. A failure is tried again by the next one.
  static absl::StatusOr<std::shared_ptr<const CudaDriver>> Get();

  const cuda::Api& api() const { return api_; }
  // OK for kSuccess. ResourceExhausted: out of memory. FailedPrecondition: the device or the driver
  // cannot do that. Internal: all else. `what` says what was tried.
  absl::Status ToStatus(cuda::Result result, absl::string_view what) const;

 private:
  CudaDriver() = default;
  absl::Status Bind(void* library);
  absl::Status Initialise() const;

  cuda::Api api_ = {};
};

}  // namespace wavekv
