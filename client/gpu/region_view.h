// What a host learns of a resident region by looking at it: once, when it is opened. Internal to
// the SDK.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "client/gpu/resident_attachment.h"
#include "client/gpu/resident_batch.h"
#include "gpu/driver/device.h"

namespace wavekv::client {

struct RegionView {
  uint64_t steady_first = 0;  // Indexes of all layers cover positions up to here.
  uint32_t ring_rows = 0;
};

// Reads the region at `address` in the device's memory. DataLoss: it is none of this sequence.
// InvalidArgument: it does not fit the model's capacities. Internal: the device failed.
absl::StatusOr<RegionView> ViewRegion(const ResidentModel& model,
                                      const ResidentAttachment& attachment,
                                      std::shared_ptr<const CudaDevice> device,
                                      cuda::DevicePointer address);

}  // namespace wavekv::client
