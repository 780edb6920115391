// In place of device_engine.cc where there is no CUDA Toolkit.
#include "tests/integration/device_engine.h"

namespace wavekv::integration {

absl::StatusOr<std::unique_ptr<TokenEngine>> MakeDeviceEngine(const ModelShape& /*shape*/,
                                                              uint64_t /*max_tokens*/,
                                                              uint32_t /*retrieve_clusters*/) {
  return absl::UnimplementedError(
      "this program was built without the CUDA Toolkit and attends on no GPU; configure with "
      "-DWAVEKV_CUDA=ON where nvcc is");
}

}  // namespace wavekv::integration
