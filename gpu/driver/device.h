// One GPU as this process uses it, and what belongs to it: streams, pinned memory, allocations that
// cross processes. RAII; nothing here launches a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gpu/driver/driver.h"
#include "storage/base/shared_memory.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

// Thread-safe. Holds the device's primary context; whatever refers to a device keeps it.
class CudaDevice {
 public:
  // A device is looked at without a context, which Open makes. FailedPrecondition, with the cure:
  // no such device, or it cannot share memory by descriptor.
  struct Identity {
    cuda::Device device = 0;
    std::string uuid;  // "GPU-" and 32 hexadecimal digits in five groups, as nvidia-smi shows it.
    std::string name;
  };
  static absl::StatusOr<Identity> Identify(const CudaDriver& driver, int ordinal);
  // The device with that uuid, whatever its ordinal is in this process: CUDA_VISIBLE_DEVICES may
  // differ between processes. FailedPrecondition names those that are there.
  static absl::StatusOr<Identity> FindByUuid(const CudaDriver& driver, absl::string_view uuid);
  // A daemon's threads sleep while they wait for the device. In an engine's process, how threads
  // wait is for the engine to say.
  enum class Waiting { kSleep, kAsItIs };
  static absl::StatusOr<std::shared_ptr<const CudaDevice>> Open(
      std::shared_ptr<const CudaDriver> driver, const Identity& identity,
      Waiting waiting = Waiting::kSleep);

  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  const Identity& identity() const { return identity_; }
  const cuda::Api& api() const { return driver_->api(); }
  // As CudaDriver::ToStatus, naming the device.
  absl::Status ToStatus(cuda::Result result, absl::string_view what) const;
  // Unit of allocations that are shared.
  uint64_t allocation_unit_bytes() const { return allocation_unit_bytes_; }

  struct Memory {
    uint64_t free_bytes = 0;
    uint64_t total_bytes = 0;
  };
  absl::StatusOr<Memory> ReadMemory() const;

  // Makes the context current in this thread while it lives.
  class Current {
   public:
    explicit Current(const CudaDevice& device);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    // Of making it current; nothing may be called on the device otherwise.
    const absl::Status& status() const { return status_; }

   private:
    const CudaDevice& device_;
    const absl::Status status_;
  };

 private:
  CudaDevice(std::shared_ptr<const CudaDriver> driver, const Identity& identity,
             cuda::Context context)
      : driver_(std::move(driver)), identity_(identity), context_(context) {}

  const std::shared_ptr<const CudaDriver> driver_;
  const Identity identity_;
  const cuda::Context context_;
  uint64_t allocation_unit_bytes_ = 0;
};

// A stream that waits for no other. Calls come from one thread at a time.
class DeviceStream {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceStream>> Create(
      std::shared_ptr<const CudaDevice> device);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  // Each is queued behind the ones before; host memory stays as it is until Synchronise.
  absl::Status CopyIn(cuda::DevicePointer target, const std::byte* source, uint64_t bytes);
  absl::Status CopyOut(std::byte* target, cuda::DevicePointer source, uint64_t bytes);
  absl::Status Zero(cuda::DevicePointer target, uint64_t bytes);
  // Whoever sees the word sees all that was queued before it. `address` is a multiple of 8.
  absl::Status StoreWord(cuda::DevicePointer address, uint64_t word);
  // Waits until all is done. What failed on the way is said here.
  absl::Status Synchronise();

  const CudaDevice& device() const { return *device_; }

 private:
  DeviceStream(std::shared_ptr<const CudaDevice> device, cuda::Stream stream)
      : device_(std::move(device)), stream_(stream) {}

  const std::shared_ptr<const CudaDevice> device_;
  const cuda::Stream stream_;
};

// Host memory that the device reads and writes by DMA: page-locked, never pageable.
class PinnedMemory {
 public:
  // ResourceExhausted: the system locks no more.
  static absl::StatusOr<std::unique_ptr<PinnedMemory>> Allocate(
      std::shared_ptr<const CudaDevice> device, uint64_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  PinnedMemory(std::shared_ptr<const CudaDevice> device, std::byte* data, uint64_t bytes)
      : device_(std::move(device)), data_(data), bytes_(bytes) {}

  const std::shared_ptr<const CudaDevice> device_;
  std::byte* const data_;
  const uint64_t bytes_;
};

// Shared memory of the host that kernels read where it lies, over the bus. Read-only if its mapping
// is, and then on a device that can (docs/decisions/015-resident-region.md).
class RegisteredMemory {
 public:
  // Locks the pages. FailedPrecondition: the device cannot register read-only memory.
  // ResourceExhausted: the system locks no more.
  static absl::StatusOr<std::unique_ptr<RegisteredMemory>> Register(
      std::shared_ptr<const CudaDevice> device, Mapping mapping);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  // As the device sees it.
  cuda::DevicePointer address() const { return address_; }
  uint64_t bytes() const { return mapping_.bytes(); }

 private:
  RegisteredMemory(std::shared_ptr<const CudaDevice> device, Mapping mapping)
      : device_(std::move(device)), mapping_(std::move(mapping)) {}

  const std::shared_ptr<const CudaDevice> device_;
  const Mapping mapping_;
  cuda::DevicePointer address_ = 0;
};

// Device memory that crosses processes as a descriptor. It lasts until every process that made or
// imported it has let go, whoever dies.
class SharedAllocation {
 public:
  // `bytes` is a multiple of the device's allocation unit. The memory is whatever was there before:
  // map and zero it before anybody else sees it. ResourceExhausted: the device has no more.
  static absl::StatusOr<std::unique_ptr<SharedAllocation>> Create(
      std::shared_ptr<const CudaDevice> device, uint64_t bytes);
  // From a descriptor of another process, which is not needed afterwards. `bytes` is what the
  // other side says; a smaller allocation shows when it is mapped.
  static absl::StatusOr<std::unique_ptr<SharedAllocation>> Import(
      std::shared_ptr<const CudaDevice> device, int fd, uint64_t bytes);
  ~SharedAllocation();
  SharedAllocation(const SharedAllocation&) = delete;
  SharedAllocation& operator=(const SharedAllocation&) = delete;

  // A new descriptor for another process.
  absl::StatusOr<UniqueFd> Export() const;

  uint64_t bytes() const { return bytes_; }
  const std::shared_ptr<const CudaDevice>& device() const { return device_; }

 private:
  friend class DeviceMapping;
  SharedAllocation(std::shared_ptr<const CudaDevice> device, cuda::AllocationHandle handle,
                   uint64_t bytes)
      : device_(std::move(device)), handle_(handle), bytes_(bytes) {}

  const std::shared_ptr<const CudaDevice> device_;
  const cuda::AllocationHandle handle_;
  const uint64_t bytes_;
};

// A whole allocation in this process's device address space, while it lives.
class DeviceMapping {
 public:
  enum Access { kReadOnly, kReadWrite };

  // InvalidArgument: the allocation is smaller than it was said to be.
  static absl::StatusOr<std::unique_ptr<DeviceMapping>> Map(
      std::shared_ptr<const SharedAllocation> allocation, Access access);
  ~DeviceMapping();
  DeviceMapping(const DeviceMapping&) = delete;
  DeviceMapping& operator=(const DeviceMapping&) = delete;

  cuda::DevicePointer address() const { return address_; }
  uint64_t bytes() const { return allocation_->bytes(); }

 private:
  explicit DeviceMapping(std::shared_ptr<const SharedAllocation> allocation)
      : allocation_(std::move(allocation)) {}

  const std::shared_ptr<const SharedAllocation> allocation_;
  cuda::DevicePointer address_ = 0;
  bool mapped_ = false;
};

}  // namespace wavekv
