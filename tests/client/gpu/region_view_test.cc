// Opening an attachment as far as the driver alone goes: over the fake one or on the GPU that is
// there (WAVEKV_TEST_GPU=1).
#include "client/gpu/region_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "client/gpu/mapping_cache.h"
#include "client/gpu/resident_shape.h"
#include "tests/client/gpu/region_host.h"
#include "tests/gpu/driver/use_fake_cuda.h"
#include "tests/shm/seed.h"

namespace wavekv::client {
namespace {

using ::testing::HasSubstr;
using std::chrono_literals::operator""ms;

constexpr std::chrono::milliseconds kWait = 5'000ms;
constexpr uint32_t kLayers = 3, kKvHeads = 2;

std::shared_ptr<const CudaDevice> TheDevice() {
  UseFakeCuda();
  const auto driver = CudaDriver::Get().value();
  return CudaDevice::Open(driver, CudaDevice::Identify(*driver, 0).value(),
                          CudaDevice::Waiting::kAsItIs)
      .value();
}

class RegionViewTest : public testing::Test {
 protected:
  RegionViewTest()
      : random_(shm::FreshSeed()), device_(TheDevice()), host_(device_, 16 << 20), cache_(device_) {
    for (uint32_t unit = 0; unit < kLayers * kKvHeads; ++unit) {
      gpu::HeadSpec spec;
      spec.segment_tokens = {100, 50};
      spec.steady_first = 1000 + 10 * (unit / kKvHeads);
      heads_.push_back(gpu::MakeHead(random_, gpu::Element::kBF16, 64, spec));
    }
  }

  gpu::RegionImage Image(uint64_t sequence) {
    return {random_,
            {.sequence_id = sequence, .layer_count = kLayers, .kv_head_count = kKvHeads},
            heads_};
  }
  ResidentAttachment Attach(uint64_t sequence) {
    gpu::RegionImage image = Image(sequence);
    return host_.Attach(image, ShapeOf(image, 2, 0.125f));
  }
  absl::StatusOr<RegionView> View(const ResidentModel& model,
                                  const ResidentAttachment& attachment) {
    const auto buffer = cache_.Buffer(attachment, kWait);
    if (!buffer.ok()) return buffer.status();
    return ViewRegion(model, attachment, device_, (*buffer)->address() + attachment.region_offset);
  }

  // Until the server's thread has noticed.
  void AwaitHeld(int expected) const {
    const auto deadline = std::chrono::steady_clock::now() + kWait;
    while (host_.held() != expected && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    EXPECT_EQ(host_.held(), expected);
  }

  std::mt19937_64 random_;
  const std::shared_ptr<const CudaDevice> device_;
  std::vector<gpu::HeadProblem> heads_;
  RegionHost host_;
  MappingCache cache_;
  const ResidentModel model_ = CompleteModel({.layer_count = kLayers,
                                              .kv_head_count = kKvHeads,
                                              .group_size = 2,
                                              .head_dim = 64,
                                              .softmax_scale = 0.125f,
                                              .max_tokens = 2000})
                                   .value();
};

TEST_F(RegionViewTest, SeesTheRingAndTheLeastOfTheLayers) {
  Attach(5);  // Another's lies before it.
  const ResidentAttachment attachment = Attach(6);
  const auto view = View(model_, attachment);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_EQ(view->steady_first, 1000u);
  EXPECT_EQ(view->ring_rows, heads_[0].spec.steady_capacity);
}

TEST_F(RegionViewTest, AnotherSequencesRegionIsRefused) {
  ResidentAttachment attachment = Attach(5);
  attachment.sequence = SequenceId(6);
  const absl::Status status = View(model_, attachment).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no resident region of sequence 6"));
}

TEST_F(RegionViewTest, ADamagedHeaderIsRefused) {
  const ResidentAttachment attachment = Attach(5);
  const auto sound = host_.Read<resident::ResidentHeader>(attachment.region_offset);
  auto damaged = sound;
  damaged.unit.log_offset = sound.region_bytes;
  host_.Write(attachment.region_offset, damaged);
  EXPECT_TRUE(absl::IsDataLoss(View(model_, attachment).status()));
  host_.Write(attachment.region_offset, sound);
  EXPECT_TRUE(View(model_, attachment).ok());
}

TEST_F(RegionViewTest, ACapacityThatIsTooSmallIsNamed) {
  const ResidentAttachment attachment = Attach(5);
  ResidentModel small = model_;
  small.segment_capacity = 1;
  absl::Status status = View(small, attachment).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("segment_capacity"));
  small = model_;
  small.cluster_capacity = gpu::kClusterPad;
  status = View(small, attachment).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("cluster_capacity"));
}

TEST_F(RegionViewTest, SequencesOfOneTenantShareOneMapping) {
  const ResidentAttachment first = Attach(5), second = Attach(6);
  {
    const auto a = cache_.Buffer(first, kWait).value(), b = cache_.Buffer(second, kWait).value();
    EXPECT_EQ(a, b);
    EXPECT_EQ(host_.redeemed(), 1);
    AwaitHeld(1);
  }
  // Nobody holds it any more: wavebufferd is told.
  AwaitHeld(0);
  EXPECT_TRUE(cache_.Buffer(first, kWait).ok());
  EXPECT_EQ(host_.redeemed(), 2);
}

TEST_F(RegionViewTest, ABufferThatIsNotToBeHadIsAnError) {
  ResidentAttachment attachment = Attach(5);
  attachment.buffer_bytes *= 2;
  EXPECT_TRUE(absl::IsInvalidArgument(cache_.Buffer(attachment, kWait).status()));
  attachment.ticket = RandomSecret();
  EXPECT_TRUE(absl::IsNotFound(cache_.Buffer(attachment, kWait).status()));
  host_.Stop();
  const absl::Status gone = cache_.Buffer(attachment, kWait).status();
  EXPECT_TRUE(absl::IsUnavailable(gone) || absl::IsNotFound(gone)) << gone;
}

TEST_F(RegionViewTest, AWindowIsRegisteredOnceHoweverOftenItsDescriptorComes) {
  ResidentAttachment attachment = Attach(5);
  PoolWindow& window = attachment.windows[0];
  PoolWindow again{UniqueFd(::dup(window.fd.get())), window.bytes};
  {
    const auto a = cache_.Window(window), b = cache_.Window(again);
    ASSERT_TRUE(a.ok() && b.ok()) << a.status() << b.status();
    EXPECT_EQ(*a, *b);
    EXPECT_NE((*a)->address(), cache_.Window(attachment.windows[1]).value()->address());
    // The rows are there.
    std::vector<std::byte> rows(window.bytes);
    auto stream = DeviceStream::Create(device_).value();
    ASSERT_TRUE(stream->CopyOut(rows.data(), (*a)->address(), rows.size()).ok());
    ASSERT_TRUE(stream->Synchronise().ok());
    const Mapping expected =
        Mapping::Map(window.fd.get(), window.bytes, Mapping::kReadOnly).value();
    EXPECT_TRUE(std::equal(rows.begin(), rows.end(), expected.data()));
  }
  EXPECT_TRUE(cache_.Window(window).ok());
}

TEST_F(RegionViewTest, AWindowThatCouldShrinkIsRefused) {
  PoolWindow window{CreateMemfd("unsealed", 4096).value(), 4096};
  EXPECT_TRUE(absl::IsFailedPrecondition(cache_.Window(window).status()));
  ASSERT_TRUE(SealForReaders(window.fd.get()).ok());
  EXPECT_TRUE(cache_.Window(window).ok());
  window.bytes = 8192;
  EXPECT_TRUE(absl::IsInvalidArgument(cache_.Window(window).status()));
}

}  // namespace
}  // namespace wavekv::client
