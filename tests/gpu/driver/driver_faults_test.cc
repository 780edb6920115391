// Memory and devices with a driver that lacks things, or fails on command: the fake one alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "gpu/driver/device.h"
#include "gpu/driver/driver.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/driver/use_fake_cuda.h"

namespace wavekv {
namespace {

constexpr uint64_t kBytes = 4096;

class DriverFaultsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!UseFakeCuda()) GTEST_SKIP() << "needs the fake driver, not WAVEKV_TEST_GPU=1";
    const auto driver = CudaDriver::Get().value();
    device_ = CudaDevice::Open(driver, CudaDevice::Identify(*driver, 0).value()).value();
    fd_ = CreateMemfd("driver_faults_test", kBytes).value();
  }
  void TearDown() override {
    ::unsetenv("FAKE_CUDA_LACKS");
    ::unsetenv("FAKE_CUDA_FAIL");
  }
  absl::StatusOr<std::unique_ptr<RegisteredMemory>> Register(Mapping::Access access) {
    return RegisteredMemory::Register(device_, Mapping::Map(fd_.get(), kBytes, access).value());
  }

  std::shared_ptr<const CudaDevice> device_;
  UniqueFd fd_;
};

TEST_F(DriverFaultsTest, ADeviceThatCannotRegisterReadOnlyMemorySaysSo) {
  ::setenv("FAKE_CUDA_LACKS", std::to_string(cuda::kAttributeReadOnlyRegister).c_str(), 1);
  const auto read_only = Register(Mapping::kReadOnly);
  EXPECT_TRUE(absl::IsFailedPrecondition(read_only.status())) << read_only.status();
  EXPECT_THAT(std::string(read_only.status().message()),
              testing::AllOf(testing::HasSubstr("read-only host memory"),
                             testing::HasSubstr(device_->identity().uuid)));
  const auto writable = Register(Mapping::kReadWrite);
  EXPECT_TRUE(writable.ok()) << writable.status();
}

TEST_F(DriverFaultsTest, MemoryThatCannotBeLockedIsSaidWithItsSize) {
  ::setenv("FAKE_CUDA_FAIL", "cuMemHostRegister", 1);
  const auto failed = Register(Mapping::kReadOnly);
  EXPECT_TRUE(absl::IsResourceExhausted(failed.status())) << failed.status();
  EXPECT_THAT(std::string(failed.status().message()), testing::HasSubstr("4096 bytes"));
}

// What was registered before the failure is taken back: else it could not be registered again.
TEST_F(DriverFaultsTest, AFailureAfterwardsLeavesNothingRegistered) {
  ::setenv("FAKE_CUDA_FAIL", "cuMemHostGetDevicePointer", 1);
  EXPECT_FALSE(Register(Mapping::kReadOnly).ok());
  ::unsetenv("FAKE_CUDA_FAIL");
  // The address that was given back is the next that the system hands out.
  const auto registered = Register(Mapping::kReadOnly);
  EXPECT_TRUE(registered.ok()) << registered.status();
}

}  // namespace
}  // namespace wavekv
