// wavebufferd --backend=cuda among processes that die, over the fake driver or on the GPU that is
// there (WAVEKV_TEST_GPU=1). The rest of what it must do is in the suites of both backends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "storage/base/descriptor_protocol.h"
#include "tests/gpu/cuda_fixture.h"

namespace wavekv {
namespace {

// A reader in another process that holds the tenant's buffer.
std::unique_ptr<ChildProcess> StartReader(const WaveBufferAccess& access) {
  return std::make_unique<ChildProcess>(std::vector<std::string>{
      ProgramPath("wave_buffer_peer"), "hold", access.device_uuid, access.socket,
      absl::BytesToHexString(access.ticket), absl::StrCat(access.buffer_bytes)});
}

TEST_F(CudaBufferTest, StartIsRefusedWithTheCure) {
  const CudaRefusal rows[] = {
      {"no such device",
       {"--device=77"},
       {"no device 77", "CUDA_VISIBLE_DEVICES", "--backend=host"}},
      {"negative device", {"--device=-1"}, {"--device is -1"}, 2},
      {"the context alone is more", {"--bytes_max=32MiB"}, {"--bytes_max is 32", "which counts"}},
      {"more than the device has", {"--bytes_max=900GiB"}, {"--bytes_max is 900", "are free"}},
      {"unknown backend", {"--backend=vulkan"}, {"host or cuda"}, 2},
      {"device without cuda", {"--backend=host", "--device=1"}, {"--backend=cuda"}, 2},
  };
  for (const CudaRefusal& row : rows) ExpectRefused(row);
}

TEST_F(CudaBufferTest, WhatIsLentHasBeenWiped) {
  Start();
  const auto stager = Connect();
  const auto access = stager->Access("uid:0", ::getuid());
  ASSERT_TRUE(access.ok()) << access.status();
  EXPECT_EQ(access->backend, "cuda");
  const auto view = ClientView::Open(*access);
  ASSERT_TRUE(view.ok()) << view.status();
  // All but the header, which is there.
  EXPECT_TRUE(std::all_of(view->data() + 4096, view->data() + view->bytes(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST_F(CudaBufferTest, KilledManagersCostNothing) {
  Start();
  for (int round = 0; round < 20; ++round) {
    ChildProcess manager({ProgramPath("wave_buffer_peer"), "manage", wavebufferd_->address(),
                          absl::StrCat(uint64_t{48} << 20)});
    ASSERT_FALSE(manager.WaitForLine("holding").empty()) << manager.output();
    EXPECT_EQ(BytesLent(), uint64_t{48} << 20);
    manager.Kill();
    ASSERT_TRUE(WaitUntil([this] { return BytesLent() == 0; })) << "round " << round;
  }
}

TEST_F(CudaBufferTest, ReaderIsCountedUntilItLetsGoOrDies) {
  Start();
  for (int round = 0; round < 5; ++round) {
    const bool dies = round % 2 == 0;
    auto stager = Connect();
    const auto access = stager->Access("uid:0", ::getuid());
    ASSERT_TRUE(access.ok()) << access.status();
    std::unique_ptr<ChildProcess> other;
    absl::StatusOr<ClientView> ours;
    if (dies) {
      other = StartReader(*access);
      ASSERT_FALSE(other->WaitForLine("holding").empty()) << other->output();
    } else {
      ours = ClientView::Open(*access);
      ASSERT_TRUE(ours.ok()) << ours.status();
    }
    stager.reset();  // Gives the buffer back; the reader still maps it.
    ASSERT_TRUE(WaitUntil([this] { return client_->Stats()->bytes_used > 0; }));
    EXPECT_EQ(BytesLent(), kCudaBufferBytes);
    if (dies) {
      other->Kill();
    } else {
      ours = absl::CancelledError("let go");
    }
    ASSERT_TRUE(WaitUntil([this] { return BytesLent() == 0; })) << "round " << round;
  }
}

TEST_F(CudaBufferTest, ReaderGoesOnWhenOwnerAndManagerAreKilled) {
  Start();
  ChildProcess manager({ProgramPath("wave_buffer_peer"), "manage", wavebufferd_->address(),
                        absl::StrCat(kCudaBufferBytes)});
  ASSERT_FALSE(manager.WaitForLine("holding").empty()) << manager.output();
  auto stager = Connect();
  ASSERT_TRUE(stager->AttachSequence("uid:0", kCudaSequence, CudaShape(), 4096).ok());
  const std::vector<StageHead> heads = CudaHeads(5);
  const auto step = stager->Stage(kCudaSequence, 0, 0, heads);
  ASSERT_TRUE(step.ok()) << step.status();
  const auto access = stager->Access("uid:0", ::getuid());
  ASSERT_TRUE(access.ok()) << access.status();
  auto view = ClientView::Open(*access);
  ASSERT_TRUE(view.ok()) << view.status();
  manager.Kill();
  wavebufferd_->process().Kill();
  ASSERT_TRUE(view->Refresh().ok());
  EXPECT_EQ(CompareSpans(CudaShape(), view->data(), view->bytes(), step->heads[0].steady,
                         heads[0].steady, 1),
            "");
  EXPECT_EQ(CompareSpans(CudaShape(), view->data(), view->bytes(), step->heads[0].retrieved,
                         heads[0].retrieved, 1),
            "");
}

TEST_F(CudaBufferTest, ManyReadersAreRefusedAndTheFirstGoOn) {
  Start();
  const auto stager = Connect();
  const auto access = stager->Access("uid:0", ::getuid());
  ASSERT_TRUE(access.ok()) << access.status();
  std::vector<HeldDescriptor> held;
  absl::Status refused;
  while (refused.ok() && held.size() < 1000) {
    auto next = FetchHeldDescriptor(access->socket, access->ticket, kWait);
    refused = next.status();
    if (next.ok()) held.push_back(*std::move(next));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(held.size(), 64u);
  held.pop_back();
  EXPECT_TRUE(WaitUntil([&] { return ClientView::Open(*access).ok(); }));
}

}  // namespace
}  // namespace wavekv
