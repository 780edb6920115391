// A wave buffer on a GPU, read into host memory: for a process that attends on the CPU. An engine
// on that GPU maps the same memory into its own kernels' address space. Internal to the SDK.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/driver/device.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/mutex.h"

namespace wavekv::client {

// Thread-safe.
class DeviceReader {
 public:
  // Imports what the descriptor stands for and maps it read-only; makes a context on the device
  // with that uuid, whatever its number is in this process. FailedPrecondition, with the cure: this
  // process cannot use it. InvalidArgument: it is smaller than `bytes`.
  static absl::StatusOr<std::unique_ptr<DeviceReader>> Open(const std::string& device_uuid,
                                                            HeldDescriptor held, uint64_t bytes);

  struct Piece {
    uint64_t offset = 0;  // From the start of the buffer; inside it.
    std::byte* target = nullptr;
    uint64_t bytes = 0;
  };
  // Returns once all are read. Unavailable: the device failed.
  absl::Status Read(std::span<const Piece> pieces) const;

  uint64_t bytes() const { return mapping_->bytes(); }

 private:
  DeviceReader(FdSocket held, std::unique_ptr<DeviceMapping> mapping,
               std::unique_ptr<DeviceStream> stream);

  const FdSocket held_;  // Closed last: it tells wavebufferd that nothing is mapped any more.
  const std::unique_ptr<DeviceMapping> mapping_;
  mutable Mutex mutex_;
  const std::unique_ptr<DeviceStream> stream_ ABSL_PT_GUARDED_BY(mutex_);
};

}  // namespace wavekv::client
