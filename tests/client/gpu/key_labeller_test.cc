// Keys labelled on the device, against the build of the daemon's own k-means; what is refused, and
// what is left to the daemon, needs no device.
#include "client/gpu/key_labeller.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gpu/kernels/device_array.h"
#include "index/backend/compute_backend.h"
#include "index/cluster/partition.h"
#include "index/simd/kernels.h"
#include "tests/gpu/kernels/device_test.h"
#include "tests/gpu/kernels/head_problem.h"
#include "tests/index/mean_cosine.h"

namespace wavekv::client {
namespace {

using gpu::DeviceArray;
using gpu::Element;

// The share of the CPU build's mean cosine that labels of the GPU must lead to.
constexpr double kCosineShareMin = 0.998;

struct Stream {
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { (void)cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;

  cudaStream_t handle = nullptr;
};

PlannedSegment Planned(uint64_t first, uint32_t tokens) {
  return {first, tokens, ClusterCountFor(tokens, 16)};
}

// Keys of one layer around topics, as a prompt's: [heads, tokens, dim].
struct LayerKeys {
  LayerKeys(Element keys_element, uint32_t head_count, uint32_t token_count, uint32_t head_dim,
            std::mt19937_64& random)
      : element(keys_element), heads(head_count), tokens(token_count), dim(head_dim) {
    std::normal_distribution<float> normal;
    for (uint32_t head = 0; head < heads; ++head) {
      std::vector<float> mean(dim), topics(size_t{256} * dim);
      for (float& x : mean) x = 3 * normal(random);
      for (float& x : topics) x = normal(random);
      size_t topic = 0;
      for (uint32_t i = 0; i < tokens; ++i) {
        if (i % 4 == 0) topic = random() % 256;
        for (uint32_t d = 0; d < dim; ++d) {
          bits.push_back(
              gpu::ToBits(element, mean[d] + topics[topic * dim + d] + 0.5f * normal(random)));
        }
      }
    }
  }

  uint16_t at(uint32_t head, uint32_t token, uint32_t d) const {
    return bits[(size_t{head} * tokens + token) * dim + d];
  }
  // [tokens, heads, dim], each token with `gap` elements behind it.
  std::vector<uint16_t> TokenMajor(uint32_t gap) const {
    std::vector<uint16_t> rows;
    for (uint32_t i = 0; i < tokens; ++i) {
      for (uint32_t head = 0; head < heads; ++head) {
        for (uint32_t d = 0; d < dim; ++d) rows.push_back(at(head, i, d));
      }
      rows.insert(rows.end(), gap, 0x7fc0);  // NaN: must not be read.
    }
    return rows;
  }
  // [segment.token_count, dim] of one head; the tensor begins at position `first`.
  std::vector<float> Floats(uint32_t head, const PlannedSegment& segment, uint64_t first) const {
    std::vector<float> keys;
    for (uint64_t i = segment.first_position - first; keys.size() < segment.token_count * dim;
         ++i) {
      for (uint32_t d = 0; d < dim; ++d) {
        keys.push_back(gpu::FromBits(element, at(head, static_cast<uint32_t>(i), d)));
      }
    }
    return keys;
  }

  const Element element;
  const uint32_t heads, tokens, dim;
  std::vector<uint16_t> bits;
};

// Of all that was launched, in order; copied.
std::vector<std::vector<uint16_t>> Labels(const KeyLabels& launched) {
  const auto segments = launched.Wait();
  EXPECT_TRUE(segments.ok()) << segments.status();
  std::vector<std::vector<uint16_t>> labels;
  for (const SegmentLabels& segment : *segments) {
    labels.emplace_back(segment.labels.begin(), segment.labels.end());
  }
  return labels;
}

struct Row {
  std::string name;
  Element element = Element::kBF16;
  uint32_t dim = 128;
};

class KeyLabellerTest : public testing::TestWithParam<Row> {
 protected:
  void SetUp() override {
    if (!gpu::HasDevice()) GTEST_SKIP() << gpu::kNoDevice;
    const uint64_t seed = gpu::TestSeed();
    RecordProperty("seed", std::to_string(seed));
    random_.seed(seed);
  }

  static DType DTypeOf(Element element) {
    return element == Element::kBF16 ? DType::kBF16 : DType::kF16;
  }

  std::mt19937_64 random_;
};

// The whole of what the daemon makes of the labels, beside the whole of its own build.
TEST_P(KeyLabellerTest, LeadsToClustersAsGoodAsTheDaemonsOwn) {
  const Row& row = GetParam();
  constexpr uint64_t kFirst = 4;
  const LayerKeys keys(row.element, 2, 13000, row.dim, random_);
  // A first stretch, a whole one would need more tokens; a rest; and a small one.
  const std::vector<PlannedSegment> plan = {Planned(4, 8188), Planned(8192, 3700),
                                            Planned(11892, 1024)};
  const auto labeller = KeyLabeller::Create(keys.heads, keys.dim, DTypeOf(row.element));
  ASSERT_TRUE(labeller.ok()) << labeller.status();
  const auto device = *DeviceArray<uint16_t>::Copy(keys.bits);
  const Stream stream;
  const auto launched = (*labeller)->Launch({.data = device.data(),
                                             .head_stride = uint64_t{keys.tokens} * keys.dim,
                                             .token_stride = keys.dim,
                                             .first_position = kFirst,
                                             .token_count = keys.tokens},
                                            plan, stream.handle);
  ASSERT_TRUE(launched.ok()) << launched.status();
  const auto segments = (*launched)->Wait();
  ASSERT_TRUE(segments.ok()) << segments.status();
  EXPECT_TRUE((*launched)->Ready());
  ASSERT_EQ(segments->size(), plan.size());
  double given = 0, own = 0;
  for (size_t s = 0; s < plan.size(); ++s) {
    const SegmentLabels& segment = (*segments)[s];
    EXPECT_EQ(segment.first_position, plan[s].first_position);
    ASSERT_EQ(segment.token_count, plan[s].token_count);
    ASSERT_EQ(segment.labels.size(), size_t{keys.heads} * segment.token_count);
    for (const uint16_t label : segment.labels) ASSERT_LT(label, plan[s].cluster_count);
    for (uint32_t head = 0; head < keys.heads; ++head) {
      const std::vector<float> floats = keys.Floats(head, plan[s], kFirst);
      const std::vector<float> points = CentreKeys(floats, segment.token_count, keys.dim);
      const auto labels =
          segment.labels.subspan(size_t{head} * segment.token_count, segment.token_count);
      const simd::Kernels& kernels = simd::ActiveKernels();
      given += segment.token_count * MeanCosine(points, keys.dim,
                                                PartitionKeys(kernels, floats, segment.token_count,
                                                              keys.dim, {}, labels));
      own += segment.token_count *
             MeanCosine(points, keys.dim,
                        PartitionKeys(kernels, floats, segment.token_count, keys.dim, {}));
    }
  }
  std::printf("mean cosine: %.5f of the CPU build's\n", given / own);
  EXPECT_GE(given, kCosineShareMin * own);
}

// Keys as a model's projection leaves them: heads beside each other in a token's row.
TEST_P(KeyLabellerTest, StridesChangeNothing) {
  const Row& row = GetParam();
  const LayerKeys keys(row.element, 3, 2200, row.dim, random_);
  const std::vector<PlannedSegment> plan = {Planned(4, 1020), Planned(1024, 1000)};
  const auto labeller = *KeyLabeller::Create(keys.heads, keys.dim, DTypeOf(row.element));
  const Stream stream;
  const auto device = *DeviceArray<uint16_t>::Copy(keys.bits);
  const auto dense = labeller->Launch({.data = device.data(),
                                       .head_stride = uint64_t{keys.tokens} * keys.dim,
                                       .token_stride = keys.dim,
                                       .token_count = keys.tokens},
                                      plan, stream.handle);
  ASSERT_TRUE(dense.ok()) << dense.status();
  for (const uint32_t gap : {0u, 8u, 136u}) {
    const auto rows = *DeviceArray<uint16_t>::Copy(keys.TokenMajor(gap));
    const auto strided = labeller->Launch({.data = rows.data(),
                                           .head_stride = keys.dim,
                                           .token_stride = uint64_t{keys.heads} * keys.dim + gap,
                                           .token_count = keys.tokens},
                                          plan, stream.handle);
    ASSERT_TRUE(strided.ok()) << strided.status();
    EXPECT_EQ(Labels(**strided), Labels(**dense)) << gap;
  }
}

// Launches of several layers are under way before the first labels are asked for; more than are
// clustered at a time; each has its own.
TEST_P(KeyLabellerTest, ManyLaunchesAtATime) {
  const Row& row = GetParam();
  constexpr uint32_t kHeads = 33;  // With 4 segments: 132 tasks.
  std::vector<PlannedSegment> plan;
  for (uint64_t first = 0; first < 4 * 300; first += 300) plan.push_back(Planned(first, 300));
  auto labeller = *KeyLabeller::Create(kHeads, row.dim, DTypeOf(row.element));
  const Stream streams[2];
  std::vector<DeviceArray<uint16_t>> device;
  std::vector<std::unique_ptr<KeyLabels>> launched;
  const auto launch = [&](size_t layer, cudaStream_t stream) {
    return labeller->Launch({.data = device[layer].data(),
                             .head_stride = uint64_t{1200} * row.dim,
                             .token_stride = row.dim,
                             .token_count = 1200},
                            plan, stream);
  };
  for (size_t layer = 0; layer < 6; ++layer) {
    device.push_back(
        *DeviceArray<uint16_t>::Copy(LayerKeys(row.element, kHeads, 1200, row.dim, random_).bits));
    auto labels = launch(layer, streams[layer % 2].handle);
    ASSERT_TRUE(labels.ok()) << labels.status();
    launched.push_back(*std::move(labels));
    // One that nobody waits for, whose memory the next ones use.
    ASSERT_TRUE(launch(layer, streams[(layer + 1) % 2].handle).ok());
  }
  for (size_t layer = 0; layer < 6; ++layer) {
    const std::vector<std::vector<uint16_t>> found = Labels(*launched[layer]);
    const auto alone = launch(layer, streams[0].handle);
    ASSERT_TRUE(alone.ok()) << alone.status();
    EXPECT_EQ(found, Labels(**alone)) << layer;
    EXPECT_NE(found[0], found[1]);
  }
  const std::vector<std::vector<uint16_t>> before = Labels(*launched[0]);
  labeller.reset();
  EXPECT_EQ(Labels(*launched[0]), before) << "outlives its labeller";
}

TEST_P(KeyLabellerTest, HeldLaunchesHaveAnEnd) {
  const Row& row = GetParam();
  const auto labeller = *KeyLabeller::Create(1, row.dim, DTypeOf(row.element));
  const Stream stream;
  const auto device =
      *DeviceArray<uint16_t>::Copy(LayerKeys(row.element, 1, 64, row.dim, random_).bits);
  const DeviceKeys keys = {.data = device.data(), .token_stride = row.dim, .token_count = 64};
  std::vector<std::unique_ptr<KeyLabels>> launched;
  for (size_t i = 0; i < KeyLabeller::kLaunchesMax; ++i) {
    auto labels = labeller->Launch(keys, {{Planned(0, 64)}}, stream.handle);
    ASSERT_TRUE(labels.ok()) << labels.status();
    launched.push_back(*std::move(labels));
  }
  EXPECT_TRUE(absl::IsResourceExhausted(
      labeller->Launch(keys, {{Planned(0, 64)}}, stream.handle).status()));
  ASSERT_TRUE(launched.back()->Wait().ok());  // Else it could still be under way.
  launched.pop_back();
  EXPECT_TRUE(labeller->Launch(keys, {{Planned(0, 64)}}, stream.handle).ok());
}

INSTANTIATE_TEST_SUITE_P(
    Rows, KeyLabellerTest,
    testing::Values(Row{.name = "BF16Dim128"},
                    Row{.name = "F16Dim64", .element = Element::kF16, .dim = 64},
                    Row{.name = "BF16Dim256", .dim = 256}),
    [](const auto& info) { return info.param.name; });

TEST(KeyLabellerShapeTest, RefusesWhatNoKernelDoes) {
  for (const auto& labeller :
       {KeyLabeller::Create(8, 80, DType::kBF16), KeyLabeller::Create(8, 128, DType::kF32),
        KeyLabeller::Create(0, 128, DType::kBF16)}) {
    EXPECT_TRUE(absl::IsInvalidArgument(labeller.status())) << labeller.status();
  }
  const auto labeller = *KeyLabeller::Create(8, 128, DType::kBF16);
  const DeviceKeys good = {.data = reinterpret_cast<const void*>(0x1000),
                           .head_stride = 1 << 20,
                           .token_stride = 128,
                           .token_count = 8192};
  DeviceKeys data = good, head = good, token = good, far = good;
  data.data = reinterpret_cast<const void*>(0x1002);
  head.head_stride = 1001;
  token.token_stride = 130;
  far.token_stride = uint64_t{1} << 33;
  for (const DeviceKeys& keys : {data, head, token, far}) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(labeller->Launch(keys, {{Planned(0, 1024)}}, nullptr).status()));
  }
}

TEST(KeyLabellerShapeTest, LeavesToTheDaemonWhatItCannotDo) {
  const auto labeller = *KeyLabeller::Create(8, 128, DType::kBF16);
  const std::vector<PlannedSegment> plan = {
      {0, 8192, 513},        // More clusters than a kernel has room for.
      {0, 8193, 512},        // More tokens.
      {0, 1024, 0},          // None.
      {0, 1024, 1025},       // More clusters than tokens.
      Planned(999, 1024),    // Begins before the keys,
      Planned(8192, 1024)};  // ends behind them.
  for (size_t i = 0; i < 4; ++i) EXPECT_FALSE(KeyLabeller::Takes(plan[i])) << i;
  EXPECT_TRUE(KeyLabeller::Takes(Planned(0, 8192)));
  // Nothing is left to do, so that no device is asked for.
  const auto launched = labeller->Launch({.data = reinterpret_cast<const void*>(0x1000),
                                          .head_stride = 1 << 20,
                                          .token_stride = 128,
                                          .first_position = 1000,
                                          .token_count = 8192},
                                         plan, nullptr);
  ASSERT_TRUE(launched.ok()) << launched.status();
  EXPECT_EQ((*launched)->segment_count(), 0u);
  EXPECT_TRUE((*launched)->Ready());
  EXPECT_TRUE((*launched)->Wait()->empty());
}

}  // namespace
}  // namespace wavekv::client
