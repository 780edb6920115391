// A tenant's wave buffer in the memory of a GPU, as wavekvd writes it.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "gpu/buffer_memory.h"
#include "gpu/device_copier.h"
#include "storage/base/mutex.h"

namespace wavekv {

// The copier of one device of this process, made when first asked for: until then there is no CUDA
// context and no driver is loaded. Thread-safe.
class DeviceCopierCache {
 public:
  // FailedPrecondition, with the cure: this process cannot use the device of that uuid.
  absl::StatusOr<std::shared_ptr<DeviceCopier>> Get(const std::string& device_uuid);

 private:
  Mutex mutex_;
  std::shared_ptr<DeviceCopier> copier_ ABSL_GUARDED_BY(mutex_);
};

// Imports and maps what wavebufferd handed out, `bytes` as it said. The descriptor is not needed
// afterwards.
absl::StatusOr<std::unique_ptr<BufferMemory>> MapDeviceBuffer(std::shared_ptr<DeviceCopier> copier,
                                                              int fd, uint64_t bytes);

}  // namespace wavekv
