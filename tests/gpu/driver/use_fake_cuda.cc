#include "tests/gpu/driver/use_fake_cuda.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string>

#include "storage/base/check.h"

namespace wavekv {

bool UseFakeCuda() {
  const char* const gpu = std::getenv("WAVEKV_TEST_GPU");
  if (gpu != nullptr && std::string(gpu) == "1") return false;
  // Loaded under the name that ours is asked for by; children look along the path.
  static void* const library = ::dlopen(FAKE_CUDA_FOLDER "/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  WAVEKV_CHECK(library != nullptr, "the fake driver is built beside the tests");
  ::setenv("LD_LIBRARY_PATH", FAKE_CUDA_FOLDER, 1);
  return true;
}

}  // namespace wavekv
