#include "gpu/driver/device_usage.h"

#include <dlfcn.h>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

namespace wavekv {
namespace {

constexpr char kManagementLibrary[] = "libnvidia-ml.so.1";

// nvmlMemory_t.
struct NvmlMemory {
  unsigned long long total = 0;
  unsigned long long free = 0;
  unsigned long long used = 0;
};

}  // namespace

absl::StatusOr<uint64_t> ReadDeviceBytesUsed(const std::string& uuid) {
  void* const library = ::dlopen(kManagementLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("no library of NVIDIA's to ask for memory in use: ", ::dlerror()));
  }
  // It stays loaded, like the driver.
  const auto init = reinterpret_cast<int (*)()>(::dlsym(library, "nvmlInit_v2"));
  const auto shutdown = reinterpret_cast<int (*)()>(::dlsym(library, "nvmlShutdown"));
  const auto by_uuid =
      reinterpret_cast<int (*)(const char*, void**)>(::dlsym(library, "nvmlDeviceGetHandleByUUID"));
  const auto memory_info =
      reinterpret_cast<int (*)(void*, NvmlMemory*)>(::dlsym(library, "nvmlDeviceGetMemoryInfo"));
  if (init == nullptr || shutdown == nullptr || by_uuid == nullptr || memory_info == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(kManagementLibrary, " lacks a function"));
  }
  if (const int error = init(); error != 0) {
    return absl::FailedPreconditionError(absl::StrCat("nvmlInit_v2 answered ", error));
  }
  const absl::Cleanup end = [shutdown] { (void)shutdown(); };
  void* device = nullptr;
  if (const int error = by_uuid(uuid.c_str(), &device); error != 0) {
    return absl::FailedPreconditionError(absl::StrCat("NVML does not find ", uuid, ": ", error));
  }
  NvmlMemory memory;
  if (const int error = memory_info(device, &memory); error != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("NVML does not say what memory of ", uuid, " is in use: ", error));
  }
  return memory.used;
}

}  // namespace wavekv
