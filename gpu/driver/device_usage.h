// How much memory of a GPU is in use, asked without a context on it.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace wavekv {

// Of all processes together, as NVIDIA's management library counts. `uuid` as
// CudaDevice::Identity has it. FailedPrecondition: there is no such library, or it refuses.
absl::StatusOr<uint64_t> ReadDeviceBytesUsed(const std::string& uuid);

}  // namespace wavekv
