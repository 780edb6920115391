// Host memory as a device: memfds.
#pragma once

#include <memory>

#include "gpu/device_memory.h"

namespace wavekv {

// Pages are taken from the kernel, which zeroes them, when first touched, and go back to it when
// the last mapping of an allocation is gone: no allocation ever sees another's bytes.
std::unique_ptr<DeviceMemory> CreateHostMemory();

}  // namespace wavekv
