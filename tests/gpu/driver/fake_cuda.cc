// A stand-in for libcuda.so.1 and libnvidia-ml.so.1 on a machine without a GPU: device memory is
// memfds, streams do at once what they are told. Programs find it through LD_LIBRARY_PATH, so that
// real processes go through the same code as with NVIDIA's driver.
//
// A device address is no host address (a bit above all of them is set): whoever touches one without
// the driver crashes. New memory is full of rubbish, as a device's may be. Environment:
//   FAKE_CUDA_FAIL     names of functions, comma-separated; each of them fails ...
//   FAKE_CUDA_RESULT   ... with this CUresult (2, out of memory, when not set)
//   FAKE_CUDA_DEVICES  number of devices (1)
//   FAKE_CUDA_UUID     first byte of device 0's uuid, the others count on from it (16)
//   FAKE_CUDA_VERSION  what the driver says it is for (13000)
//   FAKE_CUDA_LACKS    an attribute that no device has
//   FAKE_CUDA_TOTAL    bytes of a device (8 GiB)
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "gpu/driver/cuda_api.h"

namespace {

using wavekv::cuda::AccessDescriptor;
using wavekv::cuda::AllocationHandle;
using wavekv::cuda::AllocationProperties;
using wavekv::cuda::Context;
using wavekv::cuda::Device;
using wavekv::cuda::DevicePointer;
using wavekv::cuda::Result;
using wavekv::cuda::Stream;
using wavekv::cuda::Uuid;

constexpr DevicePointer kDeviceBit = DevicePointer{1} << 60;
constexpr uintptr_t kPageBytes = 4096;
constexpr size_t kUnitBytes = size_t{2} << 20;
constexpr size_t kContextBytes = size_t{300} << 20;
constexpr Result kErrorNotInitialised = 3;
constexpr Result kErrorInvalidDevice = 101;
constexpr Result kErrorInvalidContext = 201;
constexpr Result kErrorAlreadyRegistered = 712;
constexpr Result kErrorNotRegistered = 713;

std::mutex mutex;
bool initialised = false;
int contexts = 0;
size_t bytes_created = 0;                        // By this process.
std::map<AllocationHandle, size_t> allocations;  // Descriptor -> bytes made here, 0: imported.
std::map<DevicePointer, size_t> mappings;
// In the threads' static storage: what a library loaded later gets from the heap, LeakSanitizer
// takes for an old glibc's where it begins 16 bytes into a page, and follows a pointer that is
// none.
[[gnu::tls_model("initial-exec")]] thread_local int current_contexts = 0;

long Setting(const char* name, long otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtol(text, nullptr, 10);
}

size_t TotalBytes() { return static_cast<size_t>(Setting("FAKE_CUDA_TOTAL", 8L << 30)); }

// What `function` answers when it was told to fail.
Result Failure(const char* function) {
  const char* const names = std::getenv("FAKE_CUDA_FAIL");
  if (names == nullptr) return 0;
  const std::string list = std::string(",") + names + ",";
  const bool fails = list.find(std::string(",") + function + ",") != std::string::npos;
  return fails ? static_cast<Result>(Setting("FAKE_CUDA_RESULT", 2)) : 0;
}

std::byte* HostAddress(DevicePointer address) {
  return reinterpret_cast<std::byte*>(address & ~kDeviceBit);
}

// Whether [address, address + bytes) is mapped and a context is current.
Result CheckRange(DevicePointer address, size_t bytes) {
  if (current_contexts == 0) return kErrorInvalidContext;
  const std::lock_guard<std::mutex> lock(mutex);
  auto it = mappings.upper_bound(address);
  if (it == mappings.begin()) return wavekv::cuda::kErrorInvalidValue;
  --it;
  const bool inside =
      address - it->first <= it->second && bytes <= it->second - (address - it->first);
  return inside ? 0 : wavekv::cuda::kErrorInvalidValue;
}

}  // namespace

// Fails where it is told to, and where no context is current.
#define FAKE_BEGIN(name) \
  if (const Result failure = Failure(name); failure != 0) return failure
#define FAKE_BEGIN_IN_CONTEXT(name) \
  FAKE_BEGIN(name);                 \
  if (current_contexts == 0) return kErrorInvalidContext

extern "C" {

Result cuDriverGetVersion(int* version) {
  FAKE_BEGIN("cuDriverGetVersion");
  *version = static_cast<int>(Setting("FAKE_CUDA_VERSION", 13'000));
  return 0;
}

Result cuGetErrorName(Result error, const char** name) {
  *name = error == wavekv::cuda::kErrorOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_FAKE";
  return 0;
}

Result cuGetErrorString(Result /*error*/, const char** text) {
  *text = "as the fake driver was told";
  return 0;
}

Result cuInit(unsigned /*flags*/) {
  FAKE_BEGIN("cuInit");
  initialised = true;
  return 0;
}

Result cuDeviceGetCount(int* count) {
  FAKE_BEGIN("cuDeviceGetCount");
  if (!initialised) return kErrorNotInitialised;
  *count = static_cast<int>(Setting("FAKE_CUDA_DEVICES", 1));
  return 0;
}

Result cuDeviceGet(Device* device, int ordinal) {
  FAKE_BEGIN("cuDeviceGet");
  if (ordinal >= Setting("FAKE_CUDA_DEVICES", 1)) return kErrorInvalidDevice;
  *device = ordinal;
  return 0;
}

Result cuDeviceGetName(char* name, int bytes, Device /*device*/) {
  FAKE_BEGIN("cuDeviceGetName");
  std::strncpy(name, "Fake GPU", static_cast<size_t>(bytes));
  return 0;
}

Result cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
  FAKE_BEGIN("cuDeviceGetUuid");
  const long first = Setting("FAKE_CUDA_UUID", 16) + device;
  for (int i = 0; i < 16; ++i) uuid->bytes[i] = static_cast<unsigned char>(first + i);
  return 0;
}

Result cuDeviceGetAttribute(int* value, int attribute, Device /*device*/) {
  FAKE_BEGIN("cuDeviceGetAttribute");
  *value = attribute == Setting("FAKE_CUDA_LACKS", -1) ? 0 : 1;
  return 0;
}

Result cuDevicePrimaryCtxSetFlags_v2(Device /*device*/, unsigned /*flags*/) {
  FAKE_BEGIN("cuDevicePrimaryCtxSetFlags");
  return 0;
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  FAKE_BEGIN("cuDevicePrimaryCtxRetain");
  const std::lock_guard<std::mutex> lock(mutex);
  ++contexts;
  *context = reinterpret_cast<Context>(static_cast<uintptr_t>(device + 1));
  return 0;
}

Result cuDevicePrimaryCtxRelease_v2(Device /*device*/) {
  const std::lock_guard<std::mutex> lock(mutex);
  --contexts;
  return 0;
}

Result cuCtxPushCurrent_v2(Context context) {
  FAKE_BEGIN("cuCtxPushCurrent");
  if (context == nullptr) return kErrorInvalidContext;
  ++current_contexts;
  return 0;
}

Result cuCtxPopCurrent_v2(Context* context) {
  if (current_contexts == 0) return kErrorInvalidContext;
  --current_contexts;
  *context = nullptr;
  return 0;
}

Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  FAKE_BEGIN_IN_CONTEXT("cuMemGetInfo");
  const std::lock_guard<std::mutex> lock(mutex);
  *total_bytes = TotalBytes();
  *free_bytes = *total_bytes - kContextBytes - bytes_created;
  return 0;
}

Result cuMemGetAllocationGranularity(size_t* bytes, const AllocationProperties* /*properties*/,
                                     int /*option*/) {
  FAKE_BEGIN("cuMemGetAllocationGranularity");
  *bytes = kUnitBytes;
  return 0;
}

Result cuMemCreate(AllocationHandle* handle, size_t bytes,
                   const AllocationProperties* /*properties*/, unsigned long long /*flags*/) {
  FAKE_BEGIN_IN_CONTEXT("cuMemCreate");
  if (bytes % kUnitBytes != 0) return wavekv::cuda::kErrorInvalidValue;
  const std::lock_guard<std::mutex> lock(mutex);
  if (bytes > TotalBytes() - kContextBytes - bytes_created) return wavekv::cuda::kErrorOutOfMemory;
  const int fd = ::memfd_create("fake_device_memory", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    return wavekv::cuda::kErrorOutOfMemory;
  bytes_created += bytes;
  allocations[static_cast<AllocationHandle>(fd)] = bytes;
  *handle = static_cast<AllocationHandle>(fd);
  // Rubbish here and there.
  for (size_t at = 0; at < bytes; at += kUnitBytes / 2) {
    if (::pwrite(fd, "rubbish", 7, static_cast<off_t>(at)) != 7)
      return wavekv::cuda::kErrorOutOfMemory;
  }
  return 0;
}

Result cuMemRelease(AllocationHandle handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto it = allocations.find(handle);
  if (it == allocations.end()) return wavekv::cuda::kErrorInvalidValue;
  bytes_created -= it->second;
  allocations.erase(it);
  ::close(static_cast<int>(handle));
  return 0;
}

Result cuMemExportToShareableHandle(void* shareable, AllocationHandle handle, int /*type*/,
                                    unsigned long long /*flags*/) {
  FAKE_BEGIN_IN_CONTEXT("cuMemExportToShareableHandle");
  const int fd = ::dup(static_cast<int>(handle));
  if (fd < 0) return wavekv::cuda::kErrorInvalidValue;
  *static_cast<int*>(shareable) = fd;
  return 0;
}

Result cuMemImportFromShareableHandle(AllocationHandle* handle, void* shareable, int /*type*/) {
  FAKE_BEGIN_IN_CONTEXT("cuMemImportFromShareableHandle");
  const int fd = ::dup(static_cast<int>(reinterpret_cast<uintptr_t>(shareable)));
  if (fd < 0) return wavekv::cuda::kErrorInvalidValue;
  const std::lock_guard<std::mutex> lock(mutex);
  allocations[static_cast<AllocationHandle>(fd)] = 0;
  *handle = static_cast<AllocationHandle>(fd);
  return 0;
}

Result cuMemAddressReserve(DevicePointer* address, size_t bytes, size_t /*alignment*/,
                           DevicePointer /*wanted*/, unsigned long long /*flags*/) {
  FAKE_BEGIN_IN_CONTEXT("cuMemAddressReserve");
  void* const reserved =
      ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return wavekv::cuda::kErrorOutOfMemory;
  *address = reinterpret_cast<DevicePointer>(reserved) | kDeviceBit;
  return 0;
}

Result cuMemAddressFree(DevicePointer address, size_t bytes) {
  ::munmap(HostAddress(address), bytes);
  return 0;
}

Result cuMemMap(DevicePointer address, size_t bytes, size_t /*offset*/, AllocationHandle handle,
                unsigned long long /*flags*/) {
  FAKE_BEGIN_IN_CONTEXT("cuMemMap");
  struct stat info;
  if (::fstat(static_cast<int>(handle), &info) != 0 || static_cast<size_t>(info.st_size) < bytes) {
    return wavekv::cuda::kErrorInvalidValue;
  }
  void* const mapped = ::mmap(HostAddress(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                              static_cast<int>(handle), 0);
  if (mapped == MAP_FAILED) return wavekv::cuda::kErrorInvalidValue;
  const std::lock_guard<std::mutex> lock(mutex);
  mappings[address] = bytes;
  return 0;
}

Result cuMemUnmap(DevicePointer address, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  mappings.erase(address);
  // The addresses stay reserved.
  void* const reserved = ::mmap(HostAddress(address), bytes, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return reserved == MAP_FAILED ? wavekv::cuda::kErrorInvalidValue : 0;
}

Result cuMemSetAccess(DevicePointer address, size_t bytes, const AccessDescriptor* access,
                      size_t count) {
  FAKE_BEGIN_IN_CONTEXT("cuMemSetAccess");
  if (count != 1) return wavekv::cuda::kErrorInvalidValue;
  const int protection =
      access->flags == wavekv::cuda::kAccessReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  return ::mprotect(HostAddress(address), bytes, protection) == 0 ? 0 : 1;
}

Result cuMemHostAlloc(void** memory, size_t bytes, unsigned /*flags*/) {
  FAKE_BEGIN_IN_CONTEXT("cuMemHostAlloc");
  *memory = std::malloc(bytes);
  return *memory == nullptr ? wavekv::cuda::kErrorOutOfMemory : 0;
}

Result cuMemFreeHost(void* memory) {
  std::free(memory);
  return 0;
}

Result cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
  FAKE_BEGIN_IN_CONTEXT("cuMemHostRegister");
  if ((flags & wavekv::cuda::kHostRegisterDeviceMap) == 0 ||
      reinterpret_cast<uintptr_t>(memory) % kPageBytes != 0) {
    return wavekv::cuda::kErrorInvalidValue;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  const bool fresh =
      mappings.emplace(reinterpret_cast<DevicePointer>(memory) | kDeviceBit, bytes).second;
  return fresh ? 0 : kErrorAlreadyRegistered;
}

Result cuMemHostUnregister(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  const bool known = mappings.erase(reinterpret_cast<DevicePointer>(memory) | kDeviceBit) == 1;
  return known ? 0 : kErrorNotRegistered;
}

Result cuMemHostGetDevicePointer_v2(DevicePointer* address, void* memory, unsigned /*flags*/) {
  FAKE_BEGIN_IN_CONTEXT("cuMemHostGetDevicePointer");
  *address = reinterpret_cast<DevicePointer>(memory) | kDeviceBit;
  const std::lock_guard<std::mutex> lock(mutex);
  return mappings.count(*address) == 1 ? 0 : wavekv::cuda::kErrorInvalidValue;
}

Result cuStreamCreate(Stream* stream, unsigned /*flags*/) {
  FAKE_BEGIN_IN_CONTEXT("cuStreamCreate");
  *stream = reinterpret_cast<Stream>(uintptr_t{1});
  return 0;
}

Result cuStreamDestroy_v2(Stream /*stream*/) { return 0; }

Result cuStreamSynchronize(Stream /*stream*/) {
  FAKE_BEGIN_IN_CONTEXT("cuStreamSynchronize");
  return 0;
}

Result cuMemsetD8Async(DevicePointer target, unsigned char value, size_t bytes, Stream /*stream*/) {
  FAKE_BEGIN("cuMemsetD8Async");
  if (const Result error = CheckRange(target, bytes); error != 0) return error;
  std::byte* const first = HostAddress(target);
  // Whole pages are given back, which makes them zeroes, so that wiping costs no memory.
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(first) + kPageBytes - 1) & ~(kPageBytes - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(first) + bytes) & ~(kPageBytes - 1);
  const bool given_back = value == 0 && begin < end &&
                          ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_REMOVE) == 0;
  if (!given_back) {
    std::memset(first, value, bytes);
    return 0;
  }
  std::memset(first, 0, begin - reinterpret_cast<uintptr_t>(first));
  std::memset(reinterpret_cast<void*>(end), 0, reinterpret_cast<uintptr_t>(first) + bytes - end);
  return 0;
}

Result cuMemcpyHtoDAsync_v2(DevicePointer target, const void* source, size_t bytes,
                            Stream /*stream*/) {
  FAKE_BEGIN("cuMemcpyHtoDAsync");
  if (const Result error = CheckRange(target, bytes); error != 0) return error;
  std::memcpy(HostAddress(target), source, bytes);
  return 0;
}

Result cuMemcpyDtoHAsync_v2(void* target, DevicePointer source, size_t bytes, Stream /*stream*/) {
  FAKE_BEGIN("cuMemcpyDtoHAsync");
  if (const Result error = CheckRange(source, bytes); error != 0) return error;
  std::memcpy(target, HostAddress(source), bytes);
  return 0;
}

Result cuStreamWriteValue64_v2(Stream /*stream*/, DevicePointer address, uint64_t value,
                               unsigned /*flags*/) {
  FAKE_BEGIN("cuStreamWriteValue64");
  if (const Result error = CheckRange(address, sizeof(value)); error != 0) return error;
  __atomic_store_n(reinterpret_cast<uint64_t*>(HostAddress(address)), value, __ATOMIC_RELEASE);
  return 0;
}

int nvmlInit_v2() { return Failure("nvmlInit"); }
int nvmlShutdown() { return 0; }
int nvmlDeviceGetHandleByUUID(const char* /*uuid*/, void** device) {
  *device = &contexts;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* /*device*/, unsigned long long* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  const size_t used = (contexts > 0 ? kContextBytes : 0) + bytes_created;
  memory[0] = TotalBytes();
  memory[1] = TotalBytes() - used;
  memory[2] = used;
  return 0;
}

}  // extern "C"
