// The memory of one GPU as wavebufferd lends it.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "gpu/device_memory.h"
#include "gpu/driver/driver.h"

namespace wavekv {

// Allocations of CUDA's virtual memory management, handed out as file descriptors and wiped before
// the first of them leaves. Who imported one is known by the connection that it was fetched over:
// the driver does not say. Makes a context on the device, whose memory counts as overhead.
// FailedPrecondition, with the cure: no such device, or one that cannot do it. ResourceExhausted:
// `bytes_max`, the context included, is more than the device has free, or too little for a buffer.
absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateCudaMemory(
    std::shared_ptr<const CudaDriver> driver, int device_ordinal, uint64_t bytes_max);

}  // namespace wavekv
