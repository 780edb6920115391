// What attachments of one process share: the tenant's wave buffer, which it maps once, and the
// arenas of the block pool, each registered once. Internal to the SDK.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "client/gpu/resident_attachment.h"
#include "gpu/driver/device.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/mutex.h"

namespace wavekv::client {

// A wave buffer on the device, mapped to be read and written.
class MappedBuffer {
 public:
  MappedBuffer(FdSocket held, std::unique_ptr<DeviceMapping> mapping)
      : held_(std::move(held)), mapping_(std::move(mapping)) {}

  cuda::DevicePointer address() const { return mapping_->address(); }
  uint64_t bytes() const { return mapping_->bytes(); }

 private:
  const FdSocket held_;  // Closed last: it tells wavebufferd that nothing is mapped any more.
  const std::unique_ptr<DeviceMapping> mapping_;
};

// Thread-safe; no lock is held while something is opened, so that two threads that open the same
// may both map it. Forgets what nobody holds.
class MappingCache {
 public:
  explicit MappingCache(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {}

  // Trades the ticket for the buffer unless it is here. Unavailable or DeadlineExceeded:
  // wavebufferd is away. InvalidArgument: it is smaller than was said. FailedPrecondition: this
  // process cannot use it. Else what wavebufferd answered.
  absl::StatusOr<std::shared_ptr<const MappedBuffer>> Buffer(const ResidentAttachment& attachment,
                                                             std::chrono::milliseconds timeout);

  // FailedPrecondition: the descriptor could shrink under us, or the device cannot read such
  // memory. InvalidArgument: it is smaller than was said. ResourceExhausted: the system locks no
  // more.
  absl::StatusOr<std::shared_ptr<const RegisteredMemory>> Window(const PoolWindow& window);

 private:
  using FileId = std::pair<dev_t, ino_t>;  // Descriptors of one memfd have the same.

  const std::shared_ptr<const CudaDevice> device_;
  Mutex mutex_;
  std::map<std::string, std::weak_ptr<const MappedBuffer>> buffers_ ABSL_GUARDED_BY(mutex_);
  std::map<FileId, std::weak_ptr<const RegisteredMemory>> windows_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv::client
