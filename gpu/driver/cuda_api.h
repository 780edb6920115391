// The part of the CUDA driver's C interface that WaveKV calls, declared here: the driver is loaded
// at run time, so that one program runs with and without it, and none needs the CUDA Toolkit to be
// built. Where the Toolkit is found, tests/gpu/cuda_api_test.cc compares every type and constant
// with NVIDIA's cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wavekv::cuda {

using Result = int;  // CUresult
using Device = int;  // CUdevice: an ordinal.
using DevicePointer = unsigned long long;
using AllocationHandle = unsigned long long;  // CUmemGenericAllocationHandle
using Context = struct OpaqueContext*;
using Stream = struct OpaqueStream*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kErrorInvalidValue = 1;
inline constexpr Result kErrorOutOfMemory = 2;
inline constexpr Result kErrorNoDevice = 100;
inline constexpr Result kErrorNotSupported = 801;

inline constexpr int kAttributeVirtualMemory = 102;       // ..._VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
inline constexpr int kAttributePosixHandles = 103;        // ..._POSIX_FILE_DESCRIPTOR_SUPPORTED
inline constexpr int kAttributeReadOnlyRegister = 113;    // ..._READ_ONLY_HOST_REGISTER_SUPPORTED
inline constexpr int kAttributeStreamMemoryOps64 = 122;   // ..._CAN_USE_64_BIT_STREAM_MEM_OPS
inline constexpr unsigned kContextBlockingSync = 4;       // CU_CTX_SCHED_BLOCKING_SYNC
inline constexpr unsigned kHostRegisterDeviceMap = 2;     // CU_MEMHOSTREGISTER_DEVICEMAP
inline constexpr unsigned kHostRegisterReadOnly = 8;      // CU_MEMHOSTREGISTER_READ_ONLY
inline constexpr unsigned kStreamNonBlocking = 1;         // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kStreamWriteValueDefault = 0;   // With a barrier for what came before.
inline constexpr int kHandleTypePosixFileDescriptor = 1;  // CU_MEM_HANDLE_TYPE_...
inline constexpr int kAllocationTypePinned = 1;           // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kLocationTypeDevice = 1;             // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kAccessRead = 1;                     // CU_MEM_ACCESS_FLAGS_PROT_READ
inline constexpr int kAccessReadWrite = 3;                // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kGranularityRecommended = 1;         // CU_MEM_ALLOC_GRANULARITY_RECOMMENDED

struct Uuid {
  unsigned char bytes[16];
};

struct MemoryLocation {
  int type = kLocationTypeDevice;
  int id = 0;
};

struct AllocationProperties {
  int type = kAllocationTypePinned;
  int requested_handle_types = kHandleTypePosixFileDescriptor;
  MemoryLocation location;
  void* win32_handle_metadata = nullptr;
  struct {
    unsigned char compression_type;
    unsigned char gpu_direct_rdma_capable;
    unsigned short usage;
    unsigned char reserved[4];
  } flags = {};
};

struct AccessDescriptor {
  MemoryLocation location;
  int flags = kAccessRead;
};

// The driver's functions, named as it exports them but for "cu" and a version's suffix.
struct Api {
  Result (*DriverGetVersion)(int* version);
  Result (*GetErrorName)(Result error, const char** name);
  Result (*GetErrorString)(Result error, const char** text);
  Result (*Init)(unsigned flags);
  Result (*DeviceGetCount)(int* count);
  Result (*DeviceGet)(Device* device, int ordinal);
  Result (*DeviceGetName)(char* name, int bytes, Device device);
  Result (*DeviceGetUuid)(Uuid* uuid, Device device);
  Result (*DeviceGetAttribute)(int* value, int attribute, Device device);
  Result (*DevicePrimaryCtxSetFlags)(Device device, unsigned flags);
  Result (*DevicePrimaryCtxRetain)(Context* context, Device device);
  Result (*DevicePrimaryCtxRelease)(Device device);
  Result (*CtxPushCurrent)(Context context);
  Result (*CtxPopCurrent)(Context* context);
  Result (*MemGetInfo)(size_t* free_bytes, size_t* total_bytes);
  Result (*MemGetAllocationGranularity)(size_t* bytes, const AllocationProperties* properties,
                                        int option);
  Result (*MemCreate)(AllocationHandle* handle, size_t bytes,
                      const AllocationProperties* properties, unsigned long long flags);
  Result (*MemRelease)(AllocationHandle handle);
  Result (*MemExportToShareableHandle)(void* shareable, AllocationHandle handle, int type,
                                       unsigned long long flags);
  Result (*MemImportFromShareableHandle)(AllocationHandle* handle, void* shareable, int type);
  Result (*MemAddressReserve)(DevicePointer* address, size_t bytes, size_t alignment,
                              DevicePointer wanted, unsigned long long flags);
  Result (*MemAddressFree)(DevicePointer address, size_t bytes);
  Result (*MemMap)(DevicePointer address, size_t bytes, size_t offset, AllocationHandle handle,
                   unsigned long long flags);
  Result (*MemUnmap)(DevicePointer address, size_t bytes);
  Result (*MemSetAccess)(DevicePointer address, size_t bytes, const AccessDescriptor* access,
                         size_t count);
  Result (*MemHostAlloc)(void** memory, size_t bytes, unsigned flags);
  Result (*MemFreeHost)(void* memory);
  Result (*MemHostRegister)(void* memory, size_t bytes, unsigned flags);
  Result (*MemHostUnregister)(void* memory);
  Result (*MemHostGetDevicePointer)(DevicePointer* address, void* memory, unsigned flags);
  Result (*StreamCreate)(Stream* stream, unsigned flags);
  Result (*StreamDestroy)(Stream stream);
  Result (*StreamSynchronize)(Stream stream);
  Result (*MemsetD8Async)(DevicePointer target, unsigned char value, size_t bytes, Stream stream);
  Result (*MemcpyHtoDAsync)(DevicePointer target, const void* source, size_t bytes, Stream stream);
  Result (*MemcpyDtoHAsync)(void* target, DevicePointer source, size_t bytes, Stream stream);
  Result (*StreamWriteValue64)(Stream stream, DevicePointer address, uint64_t value,
                               unsigned flags);
};

}  // namespace wavekv::cuda
