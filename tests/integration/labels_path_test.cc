// Labels from a client to the index of a real daemon: with shared memory and without.
#include <cstdint>
#include <string>
#include <vector>

#include "client/admin.h"
#include "gmock/gmock.h"
#include "index/cluster/partition.h"
#include "index/cluster/spherical_kmeans.h"
#include "index/simd/kernels.h"
#include "tests/integration/host_cache.h"
#include "tests/integration/sdk_test.h"

namespace wavekv::integration {
namespace {

using testing::ElementsAre;

constexpr uint64_t kTokens = 2500, kSpare = 300;

class LabelsPathTest : public SdkTest {
 protected:
  void SetUp() override { Start({.wave_buffer = false}); }

  std::unique_ptr<client::Sequence> CreateSmallSegments(const ModelShape& shape) {
    client::SequenceOptions options;
    options.shape = shape;
    options.max_tokens = kTokens + kSpare;
    options.index.segment_tokens = 1024;
    options.index.small_segment_tokens = 256;
    options.attach_wave_buffer = attach_wave_buffer_;
    auto sequence = session().CreateSequence(options);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return std::move(sequence).value();
  }

  // Who clustered the segments of a layer, in order of position, one word for each KV head.
  std::vector<std::string> WhoClustered(const client::Sequence& sequence, uint32_t layer) {
    auto admin = client::Admin::Connect({.address = daemons().address()});
    EXPECT_TRUE(admin.ok()) << admin.status();
    const auto index = (*admin)->DescribeIndex(sequence.id(), layer);
    EXPECT_TRUE(index.ok()) << index.status();
    std::vector<std::string> who;
    for (const client::SegmentSummary& segment : index->segments) {
      who.push_back(segment.given_labels ? "given" : "own");
    }
    return who;
  }
};

// What a client's k-means is on a GPU, the daemon's own method is here: the same attention, to the
// bit, whoever clustered.
TEST_F(LabelsPathTest, AnIndexOfGivenLabelsAnswersAsTheDaemonsOwn) {
  const ModelShape shape = Shape(DType::kBF16);
  HostCache cache = HostCache::Random(shape, kTokens, 11);
  const auto own = CreateSmallSegments(shape), given = CreateSmallSegments(shape);
  const simd::Kernels& kernels = simd::ActiveKernels();
  for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
    const auto plan = given->PlanIndex(layer, kTokens);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_EQ(plan->size(), 3u);
    for (const client::PlannedSegment& segment : *plan) {
      std::vector<uint16_t> labels;
      for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
        std::vector<float> keys;
        for (uint32_t i = 0; i < segment.token_count; ++i) {
          for (uint32_t d = 0; d < shape.key_dim; ++d) {
            keys.push_back(cache.Key(layer, segment.first_position + i, head, d));
          }
        }
        const std::vector<float> points = CentreKeys(keys, segment.token_count, shape.key_dim);
        const std::vector<float> initial =
            EvenlySpaced(points, segment.token_count, shape.key_dim, segment.cluster_count);
        const auto found = SphericalKMeans(kernels, {points, initial, segment.token_count,
                                                     segment.cluster_count, shape.key_dim, 10});
        labels.insert(labels.end(), found.labels.begin(), found.labels.end());
      }
      const client::SegmentLabels one = {segment.first_position, segment.token_count, labels};
      const auto kept = given->GiveLabels(layer, {&one, 1});
      ASSERT_TRUE(kept.ok()) << kept.status();
      EXPECT_EQ(*kept, 1u);
    }
  }
  const HostCache::Chunk all = cache.All();
  for (client::Sequence* sequence : {own.get(), given.get()}) {
    ASSERT_OK(sequence->Insert(0, all.layers, all.keys, all.values));
    ASSERT_OK(sequence->BuildIndex().status());
  }
  const std::vector<float> queries = RandomQueries(shape, 12, 2.0f);
  for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
    EXPECT_THAT(WhoClustered(*own, layer), ElementsAre("own", "own", "own", "own", "own", "own"));
    EXPECT_THAT(WhoClustered(*given, layer),
                ElementsAre("given", "given", "given", "given", "given", "given"));
    const auto expected = Attend(*own, layer, QueryTensor(shape, queries));
    const auto found = Attend(*given, layer, QueryTensor(shape, queries));
    ASSERT_OK(expected.status());
    ASSERT_OK(found.status());
    EXPECT_EQ(found->out, expected->out);
    EXPECT_EQ(found->lse, expected->lse);
  }
}

// The worst labels that there are cost quality of an approximation, never an exact answer.
TEST_F(LabelsPathTest, WrongLabelsLeaveExactAnswersExact) {
  const ModelShape shape = Shape();
  HostCache cache = HostCache::Random(shape, kTokens, 13);
  const auto sequence = CreateSmallSegments(shape);
  for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
    const auto plan = sequence->PlanIndex(layer, kTokens);
    ASSERT_TRUE(plan.ok()) << plan.status();
    for (const client::PlannedSegment& segment : *plan) {
      const std::vector<uint16_t> labels(size_t{shape.kv_head_count} * segment.token_count,
                                         static_cast<uint16_t>(segment.cluster_count - 1));
      const client::SegmentLabels one = {segment.first_position, segment.token_count, labels};
      EXPECT_EQ(sequence->GiveLabels(layer, {&one, 1}).value_or(0), 1u);
    }
  }
  const HostCache::Chunk all = cache.All();
  ASSERT_OK(sequence->Insert(0, all.layers, all.keys, all.values));
  ASSERT_OK(sequence->BuildIndex().status());
  EXPECT_EQ(WhoClustered(*sequence, 1)[0], "given");
  const std::vector<float> queries = RandomQueries(shape, 14);
  const HostCache::Exact exact = cache.Attend(0, queries, kTokens);
  client::AttendOptions everything;
  everything.budget = client::Budget::Ratio(1.0);
  const auto found = Attend(*sequence, 0, QueryTensor(shape, queries), everything);
  ASSERT_OK(found.status());
  EXPECT_LT(RelativeError(found->out, exact.out), 1e-4);
}

}  // namespace
}  // namespace wavekv::integration
