// Tensors of a device copied into host memory, as Insert takes them. Internal to the SDK.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/resident_batch.h"
#include "gpu/kernels/device_array.h"
#include "storage/base/mutex.h"

namespace wavekv::client {

// Copies through page-locked memory of its own, which a device writes at the full speed of the bus,
// wherever the target lies. Thread-safe; calls come one after another.
class HostCopier {
 public:
  static constexpr size_t kStagingBytes = size_t{16} << 20;

  // Unavailable: there is no device. ResourceExhausted: the system locks no more memory.
  static absl::StatusOr<std::unique_ptr<HostCopier>> Create();

  // `bytes` from memory of device `device` to `target`, in the order of `stream`; waits for it.
  // Unavailable: CUDA failed, with its own words.
  absl::Status Copy(int device, const void* source, size_t bytes, void* target, CudaStream stream);

 private:
  explicit HostCopier(gpu::PinnedArray<char> staging) : staging_(std::move(staging)) {}

  Mutex mutex_;
  gpu::PinnedArray<char> staging_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv::client
