#include "gpu/driver/driver.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"
#include "storage/base/mutex.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr char kDriverLibrary[] = "libcuda.so.1";

struct Symbol {
  const char* name;
  void** function;
};

template <class Function>
Symbol Entry(const char* name, Function** function) {
  return {name, reinterpret_cast<void**>(function)};
}

std::string VersionText(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

}  // namespace

absl::Status CudaDriver::Bind(void* library) {
  const Symbol symbols[] = {
      Entry("cuDriverGetVersion", &api_.DriverGetVersion),
      Entry("cuGetErrorName", &api_.GetErrorName),
      Entry("cuGetErrorString", &api_.GetErrorString),
      Entry("cuInit", &api_.Init),
      Entry("cuDeviceGetCount", &api_.DeviceGetCount),
      Entry("cuDeviceGet", &api_.DeviceGet),
      Entry("cuDeviceGetName", &api_.DeviceGetName),
      Entry("cuDeviceGetUuid_v2", &api_.DeviceGetUuid),
      Entry("cuDeviceGetAttribute", &api_.DeviceGetAttribute),
      Entry("cuDevicePrimaryCtxSetFlags_v2", &api_.DevicePrimaryCtxSetFlags),
      Entry("cuDevicePrimaryCtxRetain", &api_.DevicePrimaryCtxRetain),
      Entry("cuDevicePrimaryCtxRelease_v2", &api_.DevicePrimaryCtxRelease),
      Entry("cuCtxPushCurrent_v2", &api_.CtxPushCurrent),
      Entry("cuCtxPopCurrent_v2", &api_.CtxPopCurrent),
      Entry("cuMemGetInfo_v2", &api_.MemGetInfo),
      Entry("cuMemGetAllocationGranularity", &api_.MemGetAllocationGranularity),
      Entry("cuMemCreate", &api_.MemCreate),
      Entry("cuMemRelease", &api_.MemRelease),
      Entry("cuMemExportToShareableHandle", &api_.MemExportToShareableHandle),
      Entry("cuMemImportFromShareableHandle", &api_.MemImportFromShareableHandle),
      Entry("cuMemAddressReserve", &api_.MemAddressReserve),
      Entry("cuMemAddressFree", &api_.MemAddressFree),
      Entry("cuMemMap", &api_.MemMap),
      Entry("cuMemUnmap", &api_.MemUnmap),
      Entry("cuMemSetAccess", &api_.MemSetAccess),
      Entry("cuMemHostAlloc", &api_.MemHostAlloc),
      Entry("cuMemFreeHost", &api_.MemFreeHost),
      Entry("cuMemHostRegister_v2", &api_.MemHostRegister),
      Entry("cuMemHostUnregister", &api_.MemHostUnregister),
      Entry("cuMemHostGetDevicePointer_v2", &api_.MemHostGetDevicePointer),
      Entry("cuStreamCreate", &api_.StreamCreate),
      Entry("cuStreamDestroy_v2", &api_.StreamDestroy),
      Entry("cuStreamSynchronize", &api_.StreamSynchronize),
      Entry("cuMemsetD8Async", &api_.MemsetD8Async),
      Entry("cuMemcpyHtoDAsync_v2", &api_.MemcpyHtoDAsync),
      Entry("cuMemcpyDtoHAsync_v2", &api_.MemcpyDtoHAsync),
      Entry("cuStreamWriteValue64_v2", &api_.StreamWriteValue64),
  };
  for (const Symbol& symbol : symbols) {
    *symbol.function = ::dlsym(library, symbol.name);
    if (*symbol.function != nullptr) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "the CUDA driver has no ", symbol.name, ": it is too old; expected one for CUDA ",
        VersionText(kCudaVersionMin), " or newer; update NVIDIA's driver"));
  }
  return absl::OkStatus();
}

absl::Status CudaDriver::Initialise() const {
  int version = 0;
  WAVEKV_RETURN_IF_ERROR(ToStatus(api_.DriverGetVersion(&version), "asking for its version"));
  if (version < kCudaVersionMin) {
    return absl::FailedPreconditionError(
        absl::StrCat("the CUDA driver is for CUDA ", VersionText(version), ", expected ",
                     VersionText(kCudaVersionMin), " or newer; update NVIDIA's driver"));
  }
  const absl::Status status = ToStatus(api_.Init(0), "initialising the driver");
  if (status.ok()) return status;
  return absl::FailedPreconditionError(
      absl::StrCat("the CUDA driver finds no GPU that it can use: ", status.message(),
                   "; does nvidia-smi list one, and does CUDA_VISIBLE_DEVICES leave one visible?"));
}

absl::StatusOr<std::shared_ptr<const CudaDriver>> CudaDriver::Load(const std::string& library) {
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no CUDA driver (", ::dlerror(), "); install NVIDIA's"));
  }
  std::shared_ptr<CudaDriver> driver(new CudaDriver());
  WAVEKV_RETURN_IF_ERROR(driver->Bind(handle));
  WAVEKV_RETURN_IF_ERROR(driver->Initialise());
  return driver;
}

absl::StatusOr<std::shared_ptr<const CudaDriver>> CudaDriver::Get() {
  static Mutex mutex;
  static std::shared_ptr<const CudaDriver> driver;
  MutexLock lock(&mutex);
  if (driver == nullptr) {
    WAVEKV_ASSIGN_OR_RETURN(driver, Load(kDriverLibrary));
  }
  return driver;
}

absl::Status CudaDriver::ToStatus(cuda::Result result, absl::string_view what) const {
  if (result == cuda::kSuccess) return absl::OkStatus();
  const char* name = nullptr;
  const char* text = nullptr;
  if (api_.GetErrorName(result, &name) != cuda::kSuccess || name == nullptr) name = "unknown";
  if (api_.GetErrorString(result, &text) != cuda::kSuccess || text == nullptr) text = "no text";
  auto code = absl::StatusCode::kInternal;
  if (result == cuda::kErrorOutOfMemory) code = absl::StatusCode::kResourceExhausted;
  if (result == cuda::kErrorNoDevice || result == cuda::kErrorNotSupported) {
    code = absl::StatusCode::kFailedPrecondition;
  }
  return absl::Status(code, absl::StrCat("CUDA, ", what, ": ", name, " (", result, "), ", text));
}

}  // namespace wavekv
