// The labeller's memory, over a stand-in for the CUDA runtime that runs when it is told to: how
// much there is, what is used again and when, and that nothing is freed under the device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "client/gpu/key_labeller.h"
#include "tests/gpu/kernels/fake_cuda_runtime.h"

namespace wavekv::client {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kHeads = 3, kDim = 128;

class LabellerMemoryTest : public testing::Test {
 protected:
  void SetUp() override { runtime_.Reset(); }
  void TearDown() override {
    labeller_.reset();
    EXPECT_EQ(runtime_.device_bytes, 0u);
    EXPECT_EQ(runtime_.host_bytes, 0u);
    EXPECT_EQ(runtime_.misuses, 0u);
  }

  // Keys [kHeads, 8192, kDim]; nobody reads them.
  static DeviceKeys Keys(int device = 0) {
    return {.data = reinterpret_cast<const void*>(0x1000),
            .device = device,
            .head_stride = uint64_t{8192} * kDim,
            .token_stride = kDim,
            .token_count = 8192};
  }
  static std::vector<PlannedSegment> Segments(uint32_t count, uint32_t tokens) {
    std::vector<PlannedSegment> segments;
    for (uint64_t i = 0; i < count; ++i) segments.push_back({i * tokens, tokens, tokens / 16});
    return segments;
  }
  absl::StatusOr<std::unique_ptr<KeyLabels>> Launch(uint32_t segments = 1, uint32_t tokens = 160,
                                                    int device = 0) {
    return labeller_->Launch(Keys(device), Segments(segments, tokens), nullptr);
  }

  gpu::FakeCudaRuntime& runtime_ = gpu::FakeCudaRuntime::Get();
  std::unique_ptr<KeyLabeller> labeller_ = KeyLabeller::Create(kHeads, kDim, DType::kBF16).value();
};

TEST_F(LabellerMemoryTest, LabelsComeWhenTheDeviceHasMadeThem) {
  const auto labels = Launch(2);
  ASSERT_TRUE(labels.ok()) << labels.status();
  EXPECT_FALSE((*labels)->Ready());
  EXPECT_EQ(runtime_.waits, 0u);
  runtime_.Run();
  EXPECT_TRUE((*labels)->Ready());
  const auto segments = (*labels)->Wait();
  ASSERT_TRUE(segments.ok()) << segments.status();
  EXPECT_EQ(runtime_.waits, 0u);
  ASSERT_EQ(segments->size(), 2u);
  for (const SegmentLabels& segment : *segments) {
    ASSERT_EQ(segment.labels.size(), size_t{kHeads} * 160);
    for (size_t i = 0; i < segment.labels.size(); ++i) {
      ASSERT_EQ(segment.labels[i], i % 160 % 10) << i;
    }
  }
}

// The formula in the header, below and above the 128 that are clustered at a time.
TEST_F(LabellerMemoryTest, IsAsMuchAsTheHeaderSays) {
  for (const uint32_t count : {1u, 50u}) {
    const auto held = Launch();  // So that the next one makes a workspace of its own.
    const size_t device = runtime_.device_bytes, host = runtime_.host_bytes;
    const auto labels = Launch(count, 160);
    ASSERT_TRUE(labels.ok()) << labels.status();
    const size_t n = size_t{count} * kHeads, of_each = n * 56 + 2 * n * 160;
    EXPECT_EQ(runtime_.device_bytes - device,
              of_each + std::min<size_t>(n, 128) * (1028 * kDim + 2048));
    EXPECT_EQ(runtime_.host_bytes - host, of_each);
    runtime_.Run();
    labeller_ = KeyLabeller::Create(kHeads, kDim, DType::kBF16).value();
  }
}

TEST_F(LabellerMemoryTest, IsUsedAgainWithoutAllocatingOrWaiting) {
  ASSERT_TRUE(Launch(2).ok());
  runtime_.Run();
  const size_t allocations = runtime_.allocations;
  for (int i = 0; i < 5; ++i) {
    const auto labels = Launch(1 + i % 2);
    ASSERT_TRUE(labels.ok()) << labels.status();
    runtime_.Run();
    EXPECT_TRUE((*labels)->Wait().ok());
  }
  EXPECT_EQ(runtime_.allocations, allocations);
  EXPECT_EQ(runtime_.waits, 0u);
}

// Labels that nobody waits for do not pile up before a device that is behind.
TEST_F(LabellerMemoryTest, WhatWasLetGoOfBeforeItCameHasAnEnd) {
  for (size_t i = 0; i < KeyLabeller::kLaunchesMax; ++i) {
    const auto labels = Launch();
    ASSERT_TRUE(labels.ok()) << i << ": " << labels.status();
  }
  const size_t queued = runtime_.queued(), allocations = runtime_.allocations;
  const auto refused = Launch();
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status())) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("64 to make"));
  EXPECT_EQ(runtime_.queued(), queued);
  EXPECT_EQ(runtime_.allocations, allocations);
  runtime_.Run();
  EXPECT_TRUE(Launch().ok());
}

TEST_F(LabellerMemoryTest, HeldOnesAndThoseToComeAreBoundedTogether) {
  std::vector<std::unique_ptr<KeyLabels>> held;
  for (size_t i = 0; i < KeyLabeller::kLaunchesMax; ++i) {
    auto labels = Launch();
    ASSERT_TRUE(labels.ok()) << labels.status();
    if (i % 2 == 0) held.push_back(*std::move(labels));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(Launch().status()));
  held.pop_back();  // Not made yet: nothing is gained.
  EXPECT_TRUE(absl::IsResourceExhausted(Launch().status()));
  runtime_.Run();
  EXPECT_TRUE(Launch().ok());
}

TEST_F(LabellerMemoryTest, AnotherDeviceGetsTheRoomOfOneThatIsThrough) {
  {
    std::vector<std::unique_ptr<KeyLabels>> held;
    for (size_t i = 0; i < KeyLabeller::kLaunchesMax; ++i) held.push_back(Launch().value());
    runtime_.Run();
  }
  const size_t bytes = runtime_.device_bytes;
  const auto labels = Launch(1, 160, 1);
  ASSERT_TRUE(labels.ok()) << labels.status();
  EXPECT_EQ(runtime_.device_bytes, bytes);
}

TEST_F(LabellerMemoryTest, TheLastToGoWaitsForTheDevice) {
  auto labels = Launch().value();
  ASSERT_TRUE(Launch().ok());
  labeller_.reset();
  EXPECT_EQ(runtime_.waits, 0u);
  labels.reset();
  EXPECT_EQ(runtime_.waits, 1u);
  EXPECT_EQ(runtime_.queued(), 0u);
  EXPECT_EQ(runtime_.misuses, 0u);
}

struct Failure {
  std::string function;
  int at = 1;
  bool first = true;  // Of a first launch: a later one allocates nothing.
};

class LaunchThatFailsTest : public LabellerMemoryTest,
                            public testing::WithParamInterface<Failure> {};

TEST_P(LaunchThatFailsTest, LeavesNothingBehind) {
  if (!GetParam().first) {
    ASSERT_TRUE(Launch(2).ok());
    runtime_.Run();
  }
  runtime_.failing = GetParam().function;
  runtime_.fails_at = GetParam().at;
  const auto failed = Launch(2);
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(runtime_.misuses, 0u);
  EXPECT_EQ(runtime_.queued(), 0u) << "nothing that could write to memory of others";
  EXPECT_EQ(runtime_.device_bytes + runtime_.host_bytes, 0u);
  // As many as ever can be had.
  std::vector<std::unique_ptr<KeyLabels>> held;
  for (size_t i = 0; i < KeyLabeller::kLaunchesMax; ++i) {
    auto labels = Launch();
    ASSERT_TRUE(labels.ok()) << i << ": " << labels.status();
    held.push_back(*std::move(labels));
  }
}

INSTANTIATE_TEST_SUITE_P(Calls, LaunchThatFailsTest,
                         testing::Values(Failure{"cudaMalloc"}, Failure{"cudaMalloc", 4},
                                         Failure{"cudaHostAlloc"}, Failure{"cudaHostAlloc", 2},
                                         Failure{"cudaMemcpyAsync"}, Failure{"cudaMemcpyAsync", 2},
                                         Failure{"cudaMemcpyAsync", 2, false},
                                         Failure{"LaunchKMeans"}, Failure{"LaunchKMeans", 1, false},
                                         Failure{"cudaEventCreateWithFlags"},
                                         Failure{"cudaEventRecord"},
                                         Failure{"cudaEventRecord", 1, false}),
                         [](const auto& info) {
                           return info.param.function + std::to_string(info.param.at) +
                                  (info.param.first ? "First" : "Later");
                         });

}  // namespace
}  // namespace wavekv::client
