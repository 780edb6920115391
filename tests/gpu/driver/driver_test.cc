// The driver as we load it, and memory that crosses processes, over the fake one or on the GPU that
// is there (WAVEKV_TEST_GPU=1).
#include "gpu/driver/driver.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "gpu/driver/device.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/driver/use_fake_cuda.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

class DriverTest : public ::testing::Test {
 protected:
  DriverTest() { UseFakeCuda(); }
  std::shared_ptr<const CudaDevice> Device() {
    auto driver = CudaDriver::Get();
    EXPECT_TRUE(driver.ok()) << driver.status();
    auto identity = CudaDevice::Identify(**driver, 0);
    EXPECT_TRUE(identity.ok()) << identity.status();
    auto device = CudaDevice::Open(*driver, *identity);
    EXPECT_TRUE(device.ok()) << device.status();
    return *device;
  }
};

TEST_F(DriverTest, NoDriverIsSaidWithTheCure) {
  const auto driver = CudaDriver::Load("libcuda-that-is-not-there.so.1");
  EXPECT_TRUE(absl::IsFailedPrecondition(driver.status()));
  EXPECT_THAT(std::string(driver.status().message()), HasSubstr("install NVIDIA's"));
}

TEST_F(DriverTest, LibraryWithoutTheFunctionsIsTooOld) {
  const auto driver = CudaDriver::Load("libc.so.6");
  EXPECT_TRUE(absl::IsFailedPrecondition(driver.status()));
  EXPECT_THAT(std::string(driver.status().message()), HasSubstr("cuDriverGetVersion"));
}

TEST_F(DriverTest, UuidFindsTheDeviceWhateverItsNumber) {
  const auto driver = CudaDriver::Get().value();
  const auto first = CudaDevice::Identify(*driver, 0);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_THAT(first->uuid,
              testing::MatchesRegex("GPU-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+-[0-9a-f]+"));
  EXPECT_EQ(first->uuid.size(), 40u);
  EXPECT_EQ(CudaDevice::FindByUuid(*driver, first->uuid)->device, first->device);
  const std::string other = "GPU-00000000-0000-0000-0000-000000000000";
  const auto missing = CudaDevice::FindByUuid(*driver, other);
  EXPECT_TRUE(absl::IsFailedPrecondition(missing.status()));
  EXPECT_THAT(std::string(missing.status().message()),
              testing::AllOf(HasSubstr(other), HasSubstr(first->uuid)));
}

TEST_F(DriverTest, DeviceThatIsNotThereSaysHowManyThereAre) {
  const auto driver = CudaDriver::Get().value();
  const auto identity = CudaDevice::Identify(*driver, 999);
  EXPECT_TRUE(absl::IsFailedPrecondition(identity.status()));
  EXPECT_THAT(std::string(identity.status().message()), HasSubstr("no device 999"));
}

TEST_F(DriverTest, ImportSeesTheOwnersBytesAndOutlivesTheOwner) {
  const auto device = Device();
  const uint64_t bytes = device->allocation_unit_bytes();
  std::mt19937_64 random(std::random_device{}());
  std::vector<uint64_t> words(bytes / sizeof(uint64_t));
  for (uint64_t& word : words) word = random();

  auto stream = DeviceStream::Create(device).value();
  std::shared_ptr<const SharedAllocation> owner = SharedAllocation::Create(device, bytes).value();
  const UniqueFd fd = owner->Export().value();
  {
    const auto mapping = DeviceMapping::Map(owner, DeviceMapping::kReadWrite).value();
    ASSERT_TRUE(
        stream->CopyIn(mapping->address(), reinterpret_cast<const std::byte*>(words.data()), bytes)
            .ok());
    ASSERT_TRUE(stream->Zero(mapping->address() + 64, 128).ok());
    ASSERT_TRUE(stream->StoreWord(mapping->address() + 8, 77).ok());
    ASSERT_TRUE(stream->Synchronise().ok());
  }
  owner.reset();
  std::fill_n(words.begin() + 8, 16, 0);
  words[1] = 77;

  std::shared_ptr<const SharedAllocation> imported =
      SharedAllocation::Import(device, fd.get(), bytes).value();
  const auto mapping = DeviceMapping::Map(imported, DeviceMapping::kReadOnly).value();
  std::vector<uint64_t> found(words.size());
  ASSERT_TRUE(
      stream->CopyOut(reinterpret_cast<std::byte*>(found.data()), mapping->address(), bytes).ok());
  ASSERT_TRUE(stream->Synchronise().ok());
  EXPECT_EQ(found, words);
}

TEST_F(DriverTest, AllocationSmallerThanWasSaidIsRefused) {
  const auto device = Device();
  const uint64_t unit = device->allocation_unit_bytes();
  const auto owner = SharedAllocation::Create(device, unit).value();
  const UniqueFd fd = owner->Export().value();
  std::shared_ptr<const SharedAllocation> imported =
      SharedAllocation::Import(device, fd.get(), 2 * unit).value();
  const auto mapping = DeviceMapping::Map(imported, DeviceMapping::kReadOnly);
  EXPECT_TRUE(absl::IsInvalidArgument(mapping.status())) << mapping.status();
}

// As the block pool's arenas are handed out: sealed, so that a client can map them read-only alone.
TEST_F(DriverTest, SealedHostMemoryIsReadWhereItLies) {
  const auto device = Device();
  constexpr uint64_t kBytes = 1 << 20;
  const UniqueFd fd = CreateMemfd("driver_test", kBytes).value();
  const Mapping owner = Mapping::Map(fd.get(), kBytes, Mapping::kReadWrite).value();
  ASSERT_TRUE(SealForReaders(fd.get()).ok());
  std::mt19937_64 random(std::random_device{}());
  std::vector<uint64_t> words(kBytes / sizeof(uint64_t)), found(words.size());
  for (uint64_t& word : words) word = random();
  auto stream = DeviceStream::Create(device).value();
  for (int i = 0; i < 2; ++i) {  // What was taken back can be registered again.
    auto registered = RegisteredMemory::Register(
        device, Mapping::Map(fd.get(), kBytes, Mapping::kReadOnly).value());
    ASSERT_TRUE(registered.ok()) << registered.status();
    EXPECT_EQ((*registered)->bytes(), kBytes);
    // Whatever the owner writes later is there, too.
    std::memcpy(owner.data(), words.data(), kBytes);
    ASSERT_TRUE(
        stream
            ->CopyOut(reinterpret_cast<std::byte*>(found.data()), (*registered)->address(), kBytes)
            .ok());
    ASSERT_TRUE(stream->Synchronise().ok());
    EXPECT_EQ(found, words);
    for (uint64_t& word : words) ++word;
  }
}

TEST_F(DriverTest, FailuresHaveCodesByKind) {
  const auto driver = CudaDriver::Get().value();
  EXPECT_TRUE(driver->ToStatus(cuda::kSuccess, "x").ok());
  EXPECT_TRUE(absl::IsResourceExhausted(driver->ToStatus(cuda::kErrorOutOfMemory, "x")));
  EXPECT_TRUE(absl::IsFailedPrecondition(driver->ToStatus(cuda::kErrorNoDevice, "x")));
  const absl::Status other = driver->ToStatus(cuda::kErrorInvalidValue, "trying it");
  EXPECT_TRUE(absl::IsInternal(other));
  EXPECT_THAT(std::string(other.message()), HasSubstr("trying it"));
}

}  // namespace
}  // namespace wavekv
