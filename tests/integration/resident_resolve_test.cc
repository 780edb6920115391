// What the resolve kernel makes of regions that wavekvd writes, run on the host over the fake
// driver's memory: every token of a unit is there, once, whatever versions have come and gone.
#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "client/gpu/region_view.h"
#include "client/gpu/resident_shape.h"
#include "gpu/driver/device.h"
#include "gpu/kernels/resolve_head.h"
#include "tests/gpu/driver/use_fake_cuda.h"
#include "tests/integration/resident_engine.h"
#include "tests/integration/sdk_test.h"
#include "tests/shm/seed.h"

namespace wavekv::integration {
namespace {

constexpr uint64_t kMaxTokens = 6000;
constexpr uint64_t kDeviceBit = uint64_t{1} << 60;  // As tests/gpu/driver/fake_cuda.cc has it.
constexpr std::chrono::seconds kPatience(60);

// The attachment of a running engine as ResidentBatch::Open sees it, at addresses of the host.
class OpenedRegion {
 public:
  explicit OpenedRegion(const client::ResidentAttachment& attachment) {
    const auto driver = CudaDriver::Get().value();
    const auto device =
        CudaDevice::Open(driver, CudaDevice::FindByUuid(*driver, attachment.device_uuid).value(),
                         CudaDevice::Waiting::kAsItIs);
    const ModelShape shape = ResidentShape();
    model_ = client::CompleteModel({.layer_count = shape.layer_count,
                                    .kv_head_count = shape.kv_head_count,
                                    .group_size = shape.group_size(),
                                    .head_dim = shape.key_dim,
                                    .dtype = shape.dtype,
                                    .softmax_scale = shape.softmax_scale,
                                    .max_tokens = kMaxTokens,
                                    .retrieve_capacity = gpu::kRetrieveMax})
                 .value();
    EXPECT_OK(client::CheckAttachment(model_, attachment));
    buffer_ = client::MappingCache(*device).Buffer(attachment, kPatience).value();
    const cuda::DevicePointer region = buffer_->address() + attachment.region_offset;
    const auto view = client::ViewRegion(model_, attachment, *device, region);
    EXPECT_OK(StatusOf(view));
    if (view.ok()) view_ = *view;
    for (const client::PoolWindow& window : attachment.windows) {
      mappings_.push_back(Mapping::Map(window.fd.get(), window.bytes, Mapping::kReadOnly).value());
      windows_.push_back({reinterpret_cast<const char*>(mappings_.back().data()), window.bytes});
    }
    entry_ = {.region = reinterpret_cast<char*>(region & ~kDeviceBit),
              .region_bytes = attachment.region_bytes,
              .windows = windows_.data(),
              .sequence_id = attachment.sequence.value(),
              .window_count = static_cast<uint32_t>(windows_.size())};
  }

  const client::RegionView& view() const { return view_; }
  gpu::ResolvedHead Resolve(uint32_t unit) const {
    return gpu::ResolveHead(entry_, client::ResolveShapeOf(model_), unit);
  }
  gpu::SegmentCopy Segment(const gpu::ResolvedHead& head, uint32_t i) const {
    return gpu::DescribeSegment(head.segments, entry_, model_.head_dim, i);
  }

 private:
  client::ResidentModel model_;
  std::shared_ptr<const client::MappedBuffer> buffer_;
  client::RegionView view_;
  std::vector<Mapping> mappings_;
  std::vector<gpu::ResolveWindow> windows_;
  gpu::ResolveEntry entry_;
};

class ResidentResolveTest : public SdkTest {
 protected:
  void SetUp() override {
    if (!UseFakeCuda()) GTEST_SKIP() << "the host cannot reach a real GPU's memory";
  }
};

size_t RowBytes() { return ResidentShape().key_bytes(); }

std::string Row(const void* rows, uint64_t i) {
  return {static_cast<const char*>(rows) + i * RowBytes(), RowBytes()};
}

// Keys and values of all tokens that a step of the unit would read or estimate.
std::vector<std::string> TokensOf(const OpenedRegion& region, const gpu::ResolvedHead& resolved) {
  const gpu::HeadDescriptor& head = resolved.head;
  std::vector<std::string> tokens;
  for (uint32_t i = 0; i < head.sink_count; ++i) {
    tokens.push_back(Row(head.sink_keys, i) + Row(head.sink_values, i));
  }
  for (uint64_t p = head.steady_first; p < head.state->appended; ++p) {
    const uint64_t row = p % head.steady_capacity;
    tokens.push_back(Row(head.steady_keys, row) + Row(head.steady_values, row));
  }
  for (uint32_t c = 0; c < head.cluster_count; ++c) {
    // Read by kernels for every tile.
    EXPECT_LT(head.cluster_segment[c], resolved.segments.count) << c;
    EXPECT_EQ(head.cluster_segment[c],
              head.cluster_segment[c / gpu::kClusterPad * gpu::kClusterPad]);
    EXPECT_TRUE(std::isfinite(head.centroid_scales[c])) << c;
    EXPECT_TRUE(std::isfinite(head.value_scales[c])) << c;
    EXPECT_TRUE(std::isfinite(head.value_spreads[c])) << c;
    if (head.sizes[c] == 0) continue;
    const gpu::SegmentCopy segment = region.Segment(resolved, head.cluster_segment[c]);
    EXPECT_NE(segment.keys, nullptr) << c;
    EXPECT_LE(head.value_scales[c], head.value_scale_max) << c;
    if (segment.keys == nullptr) continue;
    for (uint32_t i = 0; i < head.sizes[c]; ++i) {
      const uint64_t row = uint64_t{head.first_row[c]} + i;
      tokens.push_back(Row(segment.keys, row) + Row(segment.values, row));
    }
  }
  for (uint32_t i = 0; i < resolved.segments.count; ++i) {
    const gpu::SegmentCopy segment = region.Segment(resolved, i);
    for (const float* mean : {segment.key_mean, segment.value_mean, segment.spread_share}) {
      EXPECT_TRUE(std::all_of(mean, mean + ResidentShape().key_dim, [](float x) {
        return std::isfinite(x);
      })) << i;
    }
  }
  return tokens;
}

std::vector<std::string> TokensOf(HostCache* cache, uint32_t layer, uint32_t kv_head,
                                  uint64_t count) {
  const HostCache::Chunk chunk = cache->Slice(0, count, layer, 1);
  std::vector<std::string> tokens;
  for (uint64_t p = 0; p < count; ++p) {
    const uint64_t row = p * ResidentShape().kv_head_count + kv_head;
    tokens.push_back(Row(chunk.keys.data, row) + Row(chunk.values.data, row));
  }
  return tokens;
}

TEST_F(ResidentResolveTest, EveryTokenIsThereOnceInEveryVersion) {
  Start({.backend = "cuda"});
  HostCache cache = HostCache::Random(ResidentShape(), 3200, shm::FreshSeed());
  const auto sequence = CreateResidentSequence(session(), &cache, 2500, kMaxTokens);
  ASSERT_OK(StatusOf(sequence));
  const auto engine = ResidentEngine::Attach(sequence->get());
  ASSERT_OK(StatusOf(engine));
  const OpenedRegion region((*engine)->attachment());
  EXPECT_EQ(region.view().ring_rows, (*engine)->attachment().ring_rows);
  EXPECT_GT(region.view().steady_first, 0u);
  EXPECT_LE(region.view().steady_first, 2500u);

  uint64_t steady_first = 0, least = UINT64_MAX;
  for (int round = 0; round < 6 && !HasFailure(); ++round) {
    const uint64_t stored = (*engine)->token_count();
    for (uint32_t unit = 0; unit < 4; ++unit) {
      SCOPED_TRACE(testing::Message() << stored << " tokens, unit " << unit);
      // Like a step that has begun: what is published now stays until the next one completes.
      const gpu::ResolvedHead resolved = region.Resolve(unit);
      ASSERT_EQ(resolved.code, gpu::ResolveCode::kOk);
      ASSERT_EQ(resolved.head.state->appended, stored);
      std::vector<std::string> found = TokensOf(region, resolved);
      std::vector<std::string> expected = TokensOf(&cache, unit / 2, unit % 2, stored);
      std::sort(found.begin(), found.end());
      std::sort(expected.begin(), expected.end());
      ASSERT_EQ(found.size(), expected.size());
      ASSERT_TRUE(found == expected);
      steady_first = std::max(steady_first, resolved.head.steady_first);
      least = std::min(least, resolved.head.steady_first);
    }
    const std::vector<float> queries = RandomQueries(cache.shape(), stored);
    while ((*engine)->token_count() < stored + 100) {
      ASSERT_OK(StatusOf((*engine)->Step(&cache, queries)));
    }
  }
  EXPECT_GT(steady_first, least) << "no version came";
  ASSERT_OK((*sequence)->DetachResident());
  // Wiped, or closed as long as it is not.
  const gpu::ResolveCode after = region.Resolve(0).code;
  EXPECT_TRUE(after == gpu::ResolveCode::kClosed || after == gpu::ResolveCode::kMalformed);
}

}  // namespace
}  // namespace wavekv::integration
