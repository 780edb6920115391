// wavebufferd --backend=cuda and its manager with a driver that fails on command.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <utility>

#include "tests/gpu/cuda_fixture.h"

namespace wavekv {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Environment of processes started from now on, and of the fake driver in this one, while it lives.
class Settings {
 public:
  void Set(const char* name, const std::string& value) {
    const char* const before = std::getenv(name);
    before_.emplace_back(name,
                         before == nullptr ? std::nullopt : std::optional<std::string>(before));
    ::setenv(name, value.c_str(), 1);
  }
  void Clear() {
    for (; !before_.empty(); before_.pop_back()) {
      const auto& [name, value] = before_.back();
      if (value.has_value()) {
        ::setenv(name, value->c_str(), 1);
      } else {
        ::unsetenv(name);
      }
    }
  }
  ~Settings() { Clear(); }

 private:
  std::vector<std::pair<const char*, std::optional<std::string>>> before_;
};

class CudaFaultsTest : public CudaBufferTest {
 protected:
  void SetUp() override {
    if (!backend_.fake()) GTEST_SKIP() << "needs the fake driver, not WAVEKV_TEST_GPU=1";
  }

  Settings settings_;
};

TEST_F(CudaFaultsTest, StartIsRefusedWithTheCure) {
  const struct {
    const char* setting;
    const char* value;
    std::vector<std::string> says;
  } rows[] = {
      {"LD_LIBRARY_PATH",
       "/nowhere",
       {"there is no CUDA driver", "install NVIDIA", "--backend=host"}},
      {"FAKE_CUDA_FAIL", "cuInit", {"finds no GPU", "--backend=host"}},
      {"FAKE_CUDA_DEVICES", "0", {"no device 0"}},
      {"FAKE_CUDA_VERSION", "11040", {"11.4", "12.0", "update"}},
      {"FAKE_CUDA_LACKS", "102", {"virtual memory management"}},
      {"FAKE_CUDA_LACKS", "103", {"file descriptor"}},
      {"FAKE_CUDA_LACKS", "122", {"stream memory operations"}},
      {"FAKE_CUDA_FAIL", "cuDevicePrimaryCtxRetain", {"making a context", "OUT_OF_MEMORY"}},
  };
  for (const auto& row : rows) {
    settings_.Set(row.setting, row.value);
    ExpectRefused({.name = row.value, .says = row.says});
    settings_.Clear();
  }
}

TEST_F(CudaFaultsTest, DeviceWithoutMemoryIsSaidAndNothingStaysCounted) {
  settings_.Set("FAKE_CUDA_FAIL", "cuMemCreate");
  Start();
  const auto stager = Connect();
  const absl::Status status = stager->AttachSequence("uid:0", kCudaSequence, CudaShape(), 4096);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("OUT_OF_MEMORY"), HasSubstr("--bytes_max")));
  EXPECT_EQ(BytesLent(), 0u);
}

// What fails in wavebufferd, and in this process, which is the manager.
TEST_F(CudaFaultsTest, FailuresOnTheWayLeaveNothingBehind) {
  for (const char* const function : {"cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
                                     "cuMemsetD8Async", "cuMemExportToShareableHandle"}) {
    settings_.Set("FAKE_CUDA_FAIL", function);
    settings_.Set("FAKE_CUDA_RESULT", "999");
    Start();
    settings_.Clear();
    const auto stager = Connect();
    const absl::Status status = stager->AttachSequence("uid:0", kCudaSequence, CudaShape(), 4096);
    EXPECT_FALSE(status.ok()) << function;
    EXPECT_TRUE(WaitUntil([this] { return BytesLent() == 0; })) << function;
    wavebufferd_.reset();
  }
  Start();
  const auto stager = Connect();
  for (const char* const function :
       {"cuDevicePrimaryCtxRetain", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess",
        "cuMemHostAlloc", "cuStreamCreate", "cuMemcpyHtoDAsync"}) {
    settings_.Set("FAKE_CUDA_FAIL", function);
    const absl::Status status = stager->AttachSequence("uid:0", kCudaSequence, CudaShape(), 4096);
    EXPECT_FALSE(status.ok()) << function;
    EXPECT_TRUE(WaitUntil([this] { return BytesLent() == 0; })) << function;
    settings_.Clear();
  }
  EXPECT_TRUE(stager->AttachSequence("uid:0", kCudaSequence, CudaShape(), 4096).ok());
}

TEST_F(CudaFaultsTest, FailedTransferIsNeverAnnounced) {
  Start();
  const auto stager = Connect();
  ASSERT_TRUE(stager->AttachSequence("uid:0", kCudaSequence, CudaShape(), 4096).ok());
  const auto first = stager->Stage(kCudaSequence, 0, 0, CudaHeads(1));
  ASSERT_TRUE(first.ok()) << first.status();
  for (const char* const function :
       {"cuMemcpyHtoDAsync", "cuStreamWriteValue64", "cuCtxPushCurrent"}) {
    settings_.Set("FAKE_CUDA_FAIL", function);
    settings_.Set("FAKE_CUDA_RESULT", "700");
    const auto failed = stager->Stage(kCudaSequence, 0, first->step, CudaHeads(2));
    EXPECT_TRUE(absl::IsUnavailable(failed.status())) << function << ": " << failed.status();
    EXPECT_THAT(std::string(failed.status().message()), HasSubstr("device failed"));
    settings_.Clear();
  }
  // The numbers of those steps are gone, and the next one is whole.
  const std::vector<StageHead> heads = CudaHeads(3);
  const auto next = stager->Stage(kCudaSequence, 0, first->step, heads);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->step, first->step + 4);
  const auto access = stager->Access("uid:0", ::getuid());
  const auto view = ClientView::Open(*access);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(CompareSpans(CudaShape(), view->data(), view->bytes(), next->heads[0].steady,
                         heads[0].steady, 1),
            "");
}

TEST_F(CudaFaultsTest, AnotherDeviceThanOursIsNamedOnBothSides) {
  Start();
  const std::string theirs = client_->Attach("who")->device_uuid;
  settings_.Set("FAKE_CUDA_UUID", "99");  // Of this process, the manager, alone.
  const auto stager = Connect();
  const absl::Status status = stager->AttachSequence("uid:0", kCudaSequence, CudaShape(), 4096);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(theirs), HasSubstr("GPU-63646566"),
                                                   HasSubstr("CUDA_VISIBLE_DEVICES")));
}

}  // namespace
}  // namespace wavekv
