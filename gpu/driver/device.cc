#include "gpu/driver/device.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

std::string UuidText(const cuda::Uuid& uuid) {
  const std::string hex = absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(uuid.bytes), sizeof(uuid.bytes)));
  return absl::StrCat("GPU-", hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-",
                      hex.substr(16, 4), "-", hex.substr(20));
}

absl::StatusOr<int> DeviceCount(const CudaDriver& driver) {
  int count = 0;
  WAVEKV_RETURN_IF_ERROR(driver.ToStatus(driver.api().DeviceGetCount(&count), "counting devices"));
  return count;
}

absl::Status CheckAttribute(const CudaDevice& device, int attribute, absl::string_view what) {
  int value = 0;
  WAVEKV_RETURN_IF_ERROR(device.ToStatus(
      device.api().DeviceGetAttribute(&value, attribute, device.identity().device), what));
  if (value != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(device.identity().name, " (", device.identity().uuid, ") has no ", what,
                   ", which a wave buffer needs; use another GPU"));
}

cuda::AllocationProperties PropertiesOn(const CudaDevice& device) {
  cuda::AllocationProperties properties;
  properties.location.id = device.identity().device;
  return properties;
}

}  // namespace

absl::StatusOr<CudaDevice::Identity> CudaDevice::Identify(const CudaDriver& driver, int ordinal) {
  WAVEKV_ASSIGN_OR_RETURN(const int count, DeviceCount(driver));
  if (ordinal < 0 || ordinal >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no device ", ordinal, ": the driver shows ", count,
                     ", numbered from 0 (CUDA_VISIBLE_DEVICES hides and renumbers)"));
  }
  Identity identity;
  WAVEKV_RETURN_IF_ERROR(
      driver.ToStatus(driver.api().DeviceGet(&identity.device, ordinal), "taking a device"));
  cuda::Uuid uuid;
  WAVEKV_RETURN_IF_ERROR(
      driver.ToStatus(driver.api().DeviceGetUuid(&uuid, identity.device), "asking for its uuid"));
  identity.uuid = UuidText(uuid);
  char name[256] = {};
  WAVEKV_RETURN_IF_ERROR(driver.ToStatus(
      driver.api().DeviceGetName(name, sizeof(name) - 1, identity.device), "asking for its name"));
  identity.name = name;
  return identity;
}

absl::StatusOr<CudaDevice::Identity> CudaDevice::FindByUuid(const CudaDriver& driver,
                                                            absl::string_view uuid) {
  WAVEKV_ASSIGN_OR_RETURN(const int count, DeviceCount(driver));
  std::vector<std::string> seen;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    WAVEKV_ASSIGN_OR_RETURN(Identity identity, Identify(driver, ordinal));
    if (identity.uuid == uuid) return identity;
    seen.push_back(std::move(identity.uuid));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the wave buffer lies on ", uuid, ", which this process does not see; it sees ",
                   seen.empty() ? "none" : absl::StrJoin(seen, ", "),
                   "; make CUDA_VISIBLE_DEVICES leave that one visible"));
}

absl::StatusOr<std::shared_ptr<const CudaDevice>> CudaDevice::Open(
    std::shared_ptr<const CudaDriver> driver, const Identity& identity, Waiting waiting) {
  const cuda::Api& api = driver->api();
  // Older drivers refuse it where the context exists already, with flags of its own.
  if (waiting == Waiting::kSleep) {
    (void)api.DevicePrimaryCtxSetFlags(identity.device, cuda::kContextBlockingSync);
  }
  cuda::Context context = nullptr;
  WAVEKV_RETURN_IF_ERROR(driver->ToStatus(
      api.DevicePrimaryCtxRetain(&context, identity.device),
      absl::StrCat("making a context on ", identity.name, " (", identity.uuid, ")")));
  std::shared_ptr<CudaDevice> device(new CudaDevice(std::move(driver), identity, context));
  WAVEKV_RETURN_IF_ERROR(
      CheckAttribute(*device, cuda::kAttributeVirtualMemory, "virtual memory management"));
  WAVEKV_RETURN_IF_ERROR(
      CheckAttribute(*device, cuda::kAttributePosixHandles, "memory shared by file descriptor"));
  WAVEKV_RETURN_IF_ERROR(CheckAttribute(*device, cuda::kAttributeStreamMemoryOps64,
                                        "64-bit stream memory operations"));
  size_t unit = 0;
  const cuda::AllocationProperties properties = PropertiesOn(*device);
  WAVEKV_RETURN_IF_ERROR(device->ToStatus(
      api.MemGetAllocationGranularity(&unit, &properties, cuda::kGranularityRecommended),
      "asking for the allocation unit"));
  device->allocation_unit_bytes_ = unit;
  return device;
}

CudaDevice::~CudaDevice() { (void)api().DevicePrimaryCtxRelease(identity_.device); }

absl::Status CudaDevice::ToStatus(cuda::Result result, absl::string_view what) const {
  if (result == cuda::kSuccess) return absl::OkStatus();
  return driver_->ToStatus(result, absl::StrCat(what, " on ", identity_.uuid));
}

absl::StatusOr<CudaDevice::Memory> CudaDevice::ReadMemory() const {
  const Current current(*this);
  WAVEKV_RETURN_IF_ERROR(current.status());
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  WAVEKV_RETURN_IF_ERROR(
      ToStatus(api().MemGetInfo(&free_bytes, &total_bytes), "asking for free memory"));
  return Memory{free_bytes, total_bytes};
}

CudaDevice::Current::Current(const CudaDevice& device)
    : device_(device),
      status_(device.ToStatus(device.api().CtxPushCurrent(device.context_), "taking the context")) {
}

CudaDevice::Current::~Current() {
  cuda::Context popped = nullptr;
  if (status_.ok()) (void)device_.api().CtxPopCurrent(&popped);
}

absl::StatusOr<std::unique_ptr<DeviceStream>> DeviceStream::Create(
    std::shared_ptr<const CudaDevice> device) {
  const CudaDevice::Current current(*device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  cuda::Stream stream = nullptr;
  WAVEKV_RETURN_IF_ERROR(device->ToStatus(
      device->api().StreamCreate(&stream, cuda::kStreamNonBlocking), "creating a stream"));
  return std::unique_ptr<DeviceStream>(new DeviceStream(std::move(device), stream));
}

DeviceStream::~DeviceStream() {
  const CudaDevice::Current current(*device_);
  if (current.status().ok()) (void)device_->api().StreamDestroy(stream_);
}

absl::Status DeviceStream::CopyIn(cuda::DevicePointer target, const std::byte* source,
                                  uint64_t bytes) {
  const CudaDevice::Current current(*device_);
  WAVEKV_RETURN_IF_ERROR(current.status());
  return device_->ToStatus(device_->api().MemcpyHtoDAsync(target, source, bytes, stream_),
                           "copying to the device");
}

absl::Status DeviceStream::CopyOut(std::byte* target, cuda::DevicePointer source, uint64_t bytes) {
  const CudaDevice::Current current(*device_);
  WAVEKV_RETURN_IF_ERROR(current.status());
  return device_->ToStatus(device_->api().MemcpyDtoHAsync(target, source, bytes, stream_),
                           "copying from the device");
}

absl::Status DeviceStream::Zero(cuda::DevicePointer target, uint64_t bytes) {
  const CudaDevice::Current current(*device_);
  WAVEKV_RETURN_IF_ERROR(current.status());
  return device_->ToStatus(device_->api().MemsetD8Async(target, 0, bytes, stream_),
                           "wiping memory");
}

absl::Status DeviceStream::StoreWord(cuda::DevicePointer address, uint64_t word) {
  const CudaDevice::Current current(*device_);
  WAVEKV_RETURN_IF_ERROR(current.status());
  return device_->ToStatus(
      device_->api().StreamWriteValue64(stream_, address, word, cuda::kStreamWriteValueDefault),
      "storing a word");
}

absl::Status DeviceStream::Synchronise() {
  const CudaDevice::Current current(*device_);
  WAVEKV_RETURN_IF_ERROR(current.status());
  return device_->ToStatus(device_->api().StreamSynchronize(stream_), "waiting for a stream");
}

absl::StatusOr<std::unique_ptr<PinnedMemory>> PinnedMemory::Allocate(
    std::shared_ptr<const CudaDevice> device, uint64_t bytes) {
  const CudaDevice::Current current(*device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  void* data = nullptr;
  WAVEKV_RETURN_IF_ERROR(device->ToStatus(device->api().MemHostAlloc(&data, bytes, 0),
                                          absl::StrCat("pinning ", bytes, " bytes for transfers")));
  return std::unique_ptr<PinnedMemory>(
      new PinnedMemory(std::move(device), static_cast<std::byte*>(data), bytes));
}

PinnedMemory::~PinnedMemory() {
  const CudaDevice::Current current(*device_);
  if (current.status().ok()) (void)device_->api().MemFreeHost(data_);
}

absl::StatusOr<std::unique_ptr<RegisteredMemory>> RegisteredMemory::Register(
    std::shared_ptr<const CudaDevice> device, Mapping mapping) {
  const cuda::Api& api = device->api();
  const CudaDevice::Current current(*device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  unsigned flags = cuda::kHostRegisterDeviceMap;
  if (mapping.access() == Mapping::kReadOnly) {
    WAVEKV_RETURN_IF_ERROR(CheckAttribute(*device, cuda::kAttributeReadOnlyRegister,
                                          "registration of read-only host memory"));
    flags |= cuda::kHostRegisterReadOnly;
  }
  void* const data = mapping.data();
  WAVEKV_RETURN_IF_ERROR(
      device->ToStatus(api.MemHostRegister(data, mapping.bytes(), flags),
                       absl::StrCat("registering ", mapping.bytes(), " bytes of shared memory")));
  // From here on the destructor takes the registration back.
  std::unique_ptr<RegisteredMemory> memory(
      new RegisteredMemory(std::move(device), std::move(mapping)));
  WAVEKV_RETURN_IF_ERROR(
      memory->device_->ToStatus(api.MemHostGetDevicePointer(&memory->address_, data, 0),
                                "asking where the device sees shared memory"));
  return memory;
}

RegisteredMemory::~RegisteredMemory() {
  const CudaDevice::Current current(*device_);
  if (current.status().ok()) (void)device_->api().MemHostUnregister(mapping_.data());
}

absl::StatusOr<std::unique_ptr<SharedAllocation>> SharedAllocation::Create(
    std::shared_ptr<const CudaDevice> device, uint64_t bytes) {
  const CudaDevice::Current current(*device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  const cuda::AllocationProperties properties = PropertiesOn(*device);
  cuda::AllocationHandle handle = 0;
  WAVEKV_RETURN_IF_ERROR(device->ToStatus(device->api().MemCreate(&handle, bytes, &properties, 0),
                                          absl::StrCat("allocating ", bytes, " bytes")));
  return std::unique_ptr<SharedAllocation>(new SharedAllocation(std::move(device), handle, bytes));
}

absl::StatusOr<std::unique_ptr<SharedAllocation>> SharedAllocation::Import(
    std::shared_ptr<const CudaDevice> device, int fd, uint64_t bytes) {
  const CudaDevice::Current current(*device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  cuda::AllocationHandle handle = 0;
  void* const shareable = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));
  WAVEKV_RETURN_IF_ERROR(
      device->ToStatus(device->api().MemImportFromShareableHandle(
                           &handle, shareable, cuda::kHandleTypePosixFileDescriptor),
                       "importing another process's memory"));
  return std::unique_ptr<SharedAllocation>(new SharedAllocation(std::move(device), handle, bytes));
}

SharedAllocation::~SharedAllocation() {
  const CudaDevice::Current current(*device_);
  if (current.status().ok()) (void)device_->api().MemRelease(handle_);
}

absl::StatusOr<UniqueFd> SharedAllocation::Export() const {
  const CudaDevice::Current current(*device_);
  WAVEKV_RETURN_IF_ERROR(current.status());
  int fd = -1;
  WAVEKV_RETURN_IF_ERROR(
      device_->ToStatus(device_->api().MemExportToShareableHandle(
                            &fd, handle_, cuda::kHandleTypePosixFileDescriptor, 0),
                        "exporting memory"));
  return UniqueFd(fd);
}

absl::StatusOr<std::unique_ptr<DeviceMapping>> DeviceMapping::Map(
    std::shared_ptr<const SharedAllocation> allocation, Access access) {
  const CudaDevice& device = *allocation->device();
  const cuda::Api& api = device.api();
  const cuda::AllocationHandle handle = allocation->handle_;
  const uint64_t bytes = allocation->bytes();
  const CudaDevice::Current current(device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  std::unique_ptr<DeviceMapping> mapping(new DeviceMapping(std::move(allocation)));
  WAVEKV_RETURN_IF_ERROR(
      device.ToStatus(api.MemAddressReserve(&mapping->address_, bytes, 0, 0, 0),
                      absl::StrCat("reserving addresses for ", bytes, " bytes")));
  const cuda::Result mapped = api.MemMap(mapping->address_, bytes, 0, handle, 0);
  // Which of the two is the driver's choice.
  if (mapped == cuda::kErrorInvalidValue || mapped == cuda::kErrorNotSupported) {
    return absl::InvalidArgumentError(absl::StrCat("the allocation on ", device.identity().uuid,
                                                   " cannot be mapped with ", bytes,
                                                   " bytes: it is smaller than was said"));
  }
  WAVEKV_RETURN_IF_ERROR(device.ToStatus(mapped, absl::StrCat("mapping ", bytes, " bytes")));
  mapping->mapped_ = true;
  cuda::AccessDescriptor descriptor;
  descriptor.location.id = device.identity().device;
  descriptor.flags = access == kReadWrite ? cuda::kAccessReadWrite : cuda::kAccessRead;
  WAVEKV_RETURN_IF_ERROR(device.ToStatus(api.MemSetAccess(mapping->address_, bytes, &descriptor, 1),
                                         "allowing access to memory"));
  return mapping;
}

DeviceMapping::~DeviceMapping() {
  const CudaDevice& device = *allocation_->device();
  const CudaDevice::Current current(device);
  if (!current.status().ok()) return;
  if (mapped_) (void)device.api().MemUnmap(address_, bytes());
  if (address_ != 0) (void)device.api().MemAddressFree(address_, bytes());
}

}  // namespace wavekv
