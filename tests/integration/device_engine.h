// A token engine whose steps are the SDK's kernels on a real GPU.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "tests/integration/token_engine.h"

namespace wavekv::integration {

// On CUDA's device 0. A MakeTokenEngine. FailedPrecondition, with the cure: there is no driver or
// no GPU. Unimplemented: this program was built without the CUDA Toolkit. InvalidArgument: no
// kernels are made for such a shape.
absl::StatusOr<std::unique_ptr<TokenEngine>> MakeDeviceEngine(const ModelShape& shape,
                                                              uint64_t max_tokens,
                                                              uint32_t retrieve_clusters);

}  // namespace wavekv::integration
