// Our declarations of the driver's interface against NVIDIA's: the compiler does the comparing.
#include "gpu/driver/cuda_api.h"

#include <cuda.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

namespace wavekv::cuda {
namespace {

// The same function to a caller: arguments and results of the same sizes, in the same places.
template <class T>
constexpr bool kPassedAlike = sizeof(T) <= sizeof(void*) && std::is_trivially_copyable_v<T>;

template <class Ours, class Theirs>
struct Alike : std::false_type {};
template <class R1, class... A1, class R2, class... A2>
struct Alike<R1 (*)(A1...), R2(A2...)>
    : std::bool_constant<sizeof...(A1) == sizeof...(A2) && sizeof(R1) == sizeof(R2) &&
                         ((sizeof(A1) == sizeof(A2) && kPassedAlike<A1> &&
                           kPassedAlike<A2>)&&...)> {};

#define EXPECT_SAME_FUNCTION(ours, theirs) \
  static_assert(Alike<decltype(Api::ours), decltype(theirs)>::value, #ours)

EXPECT_SAME_FUNCTION(DriverGetVersion, cuDriverGetVersion);
EXPECT_SAME_FUNCTION(GetErrorName, cuGetErrorName);
EXPECT_SAME_FUNCTION(GetErrorString, cuGetErrorString);
EXPECT_SAME_FUNCTION(Init, cuInit);
EXPECT_SAME_FUNCTION(DeviceGetCount, cuDeviceGetCount);
EXPECT_SAME_FUNCTION(DeviceGet, cuDeviceGet);
EXPECT_SAME_FUNCTION(DeviceGetName, cuDeviceGetName);
EXPECT_SAME_FUNCTION(DeviceGetUuid, cuDeviceGetUuid_v2);
EXPECT_SAME_FUNCTION(DeviceGetAttribute, cuDeviceGetAttribute);
EXPECT_SAME_FUNCTION(DevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2);
EXPECT_SAME_FUNCTION(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain);
EXPECT_SAME_FUNCTION(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2);
EXPECT_SAME_FUNCTION(CtxPushCurrent, cuCtxPushCurrent_v2);
EXPECT_SAME_FUNCTION(CtxPopCurrent, cuCtxPopCurrent_v2);
EXPECT_SAME_FUNCTION(MemGetInfo, cuMemGetInfo_v2);
EXPECT_SAME_FUNCTION(MemGetAllocationGranularity, cuMemGetAllocationGranularity);
EXPECT_SAME_FUNCTION(MemCreate, cuMemCreate);
EXPECT_SAME_FUNCTION(MemRelease, cuMemRelease);
EXPECT_SAME_FUNCTION(MemExportToShareableHandle, cuMemExportToShareableHandle);
EXPECT_SAME_FUNCTION(MemImportFromShareableHandle, cuMemImportFromShareableHandle);
EXPECT_SAME_FUNCTION(MemAddressReserve, cuMemAddressReserve);
EXPECT_SAME_FUNCTION(MemAddressFree, cuMemAddressFree);
EXPECT_SAME_FUNCTION(MemMap, cuMemMap);
EXPECT_SAME_FUNCTION(MemUnmap, cuMemUnmap);
EXPECT_SAME_FUNCTION(MemSetAccess, cuMemSetAccess);
EXPECT_SAME_FUNCTION(MemHostAlloc, cuMemHostAlloc);
EXPECT_SAME_FUNCTION(MemFreeHost, cuMemFreeHost);
EXPECT_SAME_FUNCTION(MemHostRegister, cuMemHostRegister_v2);
EXPECT_SAME_FUNCTION(MemHostUnregister, cuMemHostUnregister);
EXPECT_SAME_FUNCTION(MemHostGetDevicePointer, cuMemHostGetDevicePointer_v2);
EXPECT_SAME_FUNCTION(StreamCreate, cuStreamCreate);
EXPECT_SAME_FUNCTION(StreamDestroy, cuStreamDestroy_v2);
EXPECT_SAME_FUNCTION(StreamSynchronize, cuStreamSynchronize);
EXPECT_SAME_FUNCTION(MemsetD8Async, cuMemsetD8Async);
EXPECT_SAME_FUNCTION(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2);
EXPECT_SAME_FUNCTION(MemcpyDtoHAsync, cuMemcpyDtoHAsync_v2);
EXPECT_SAME_FUNCTION(StreamWriteValue64, cuStreamWriteValue64_v2);

static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(AllocationProperties, requested_handle_types) ==
              offsetof(CUmemAllocationProp, requestedHandleTypes));
static_assert(offsetof(AllocationProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(AllocationProperties, win32_handle_metadata) ==
              offsetof(CUmemAllocationProp, win32HandleMetaData));
static_assert(offsetof(AllocationProperties, flags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(MemoryLocation) == sizeof(CUmemLocation) &&
              offsetof(MemoryLocation, id) == offsetof(CUmemLocation, id));
static_assert(sizeof(AccessDescriptor) == sizeof(CUmemAccessDesc) &&
              offsetof(AccessDescriptor, flags) == offsetof(CUmemAccessDesc, flags));
static_assert(sizeof(Uuid) == sizeof(CUuuid));

TEST(CudaApiTest, ConstantsAreTheDriversOwn) {
  const struct {
    long ours;
    long theirs;
  } rows[] = {
      {kSuccess, CUDA_SUCCESS},
      {kErrorInvalidValue, CUDA_ERROR_INVALID_VALUE},
      {kErrorOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY},
      {kErrorNoDevice, CUDA_ERROR_NO_DEVICE},
      {kErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED},
      {kAttributeVirtualMemory, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED},
      {kAttributePosixHandles, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED},
      {kAttributeReadOnlyRegister, CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED},
      {kAttributeStreamMemoryOps64, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS},
      {kContextBlockingSync, CU_CTX_SCHED_BLOCKING_SYNC},
      {kHostRegisterDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP},
      {kHostRegisterReadOnly, CU_MEMHOSTREGISTER_READ_ONLY},
      {kStreamNonBlocking, CU_STREAM_NON_BLOCKING},
      {kStreamWriteValueDefault, CU_STREAM_WRITE_VALUE_DEFAULT},
      {kHandleTypePosixFileDescriptor, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR},
      {kAllocationTypePinned, CU_MEM_ALLOCATION_TYPE_PINNED},
      {kLocationTypeDevice, CU_MEM_LOCATION_TYPE_DEVICE},
      {kAccessRead, CU_MEM_ACCESS_FLAGS_PROT_READ},
      {kAccessReadWrite, CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
      {kGranularityRecommended, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED},
  };
  for (size_t i = 0; i < std::size(rows); ++i) EXPECT_EQ(rows[i].ours, rows[i].theirs) << i;
}

}  // namespace
}  // namespace wavekv::cuda
