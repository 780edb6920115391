// What an engine hears where there is no driver. Not among the tests of scripts/gpu_check.sh.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "client/gpu/resident_batch.h"
#include "gpu/driver/driver.h"

namespace wavekv::client {
namespace {

TEST(NoDeviceTest, CreateSaysWhatIsMissing) {
  if (CudaDriver::Get().ok()) GTEST_SKIP() << "this machine has a driver";
  const ResidentModel model = {.layer_count = 1,
                               .kv_head_count = 1,
                               .group_size = 1,
                               .head_dim = 64,
                               .softmax_scale = 1,
                               .max_tokens = 1000};
  const auto batch = ResidentBatch::Create(model);
  EXPECT_TRUE(absl::IsFailedPrecondition(batch.status())) << batch.status();
  EXPECT_THAT(std::string(batch.status().message()), testing::HasSubstr("CUDA driver"));
}

}  // namespace
}  // namespace wavekv::client
