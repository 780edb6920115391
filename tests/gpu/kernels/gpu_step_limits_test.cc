// What a step can take: very many clusters, and the shapes that it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gpu/kernels/step_launch.h"
#include "tests/gpu/kernels/device_batch.h"
#include "tests/gpu/kernels/device_test.h"
#include "tests/gpu/kernels/head_problem.h"

namespace wavekv::gpu {
namespace {

// Clusters of one token, `segments` times 8,192.
HeadSpec Singles(uint32_t segments, uint32_t retrieve) {
  HeadSpec spec;
  spec.segment_tokens.assign(segments, 8192);
  spec.cluster_tokens_max = 1;
  spec.retrieve = retrieve;
  return spec;
}

// Queries' components are normal times `query_scale`; `tolerance` is the rank's, relative.
struct LargeRow {
  const char* name;
  float query_scale;
  double tolerance;
};

class StepLargeRowTest : public testing::TestWithParam<LargeRow> {};

// 4 M tokens make 262,144 clusters of 16: the selection alone is what grows. Clusters of one token
// keep the oracle's memory small. Where queries are small nearly all ranks are alike.
TEST_P(StepLargeRowTest, SelectsAmongAQuarterOfAMillionClusters) {
  if (!HasDevice()) GTEST_SKIP() << kNoDevice;
  std::mt19937_64 random(TestSeed());
  const HeadSpec spec = Singles(32, 4718);
  const HeadProblem head = MakeHead(random, Element::kBF16, 64, spec);
  ASSERT_EQ(head.real_clusters, 262144u);
  StepShape shape{.batch = 1, .kv_heads = 1, .group = 4, .head_dim = 64, .scale = 0.125f};
  shape.rank_by_mass = true;  // The expected error of a lone token is nothing.
  shape.cluster_capacity = head.cluster_count();
  shape.segment_capacity = static_cast<uint32_t>(head.segments.size());
  shape.retrieve_capacity = spec.retrieve;
  ASSERT_TRUE(ValidateShape(shape).ok()) << ValidateShape(shape);
  auto batch = DeviceBatch::Make(shape, {&head, 1}, {true}, CacheSpec{}, random);
  ASSERT_TRUE(batch.ok()) << batch.status();
  std::normal_distribution<float> normal;
  std::vector<uint16_t> bits(4 * 64);
  std::vector<double> queries;
  for (uint16_t& x : bits) {
    x = ToBits(Element::kBF16, GetParam().query_scale * normal(random));
    queries.push_back(FromBits(Element::kBF16, x));
  }
  ASSERT_TRUE((*batch)->SetInputs(bits, {}, {}).ok());
  const auto results = (*batch)->Run(true);
  ASSERT_TRUE(results.ok()) << results.status();
  const StepOracle oracle(head, queries, 4, 0.125, spec.steady_first + spec.steady);
  const std::vector<double> ranks = oracle.Ranks(true);
  std::vector<double> sorted = ranks;
  std::nth_element(sorted.begin(), sorted.begin() + spec.retrieve - 1, sorted.end(),
                   std::greater<>());
  const double threshold = sorted[spec.retrieve - 1];
  if (GetParam().query_scale < 1) {
    // More than the selection compares with each other, in half of one of its bins' width.
    const auto close = std::ranges::count_if(
        ranks, [&](double rank) { return std::abs(std::log2(rank / threshold)) < 1.0 / 128; });
    ASSERT_GT(close, 1024);
  }
  ASSERT_EQ(results->retrieved[0].size(), spec.retrieve);
  for (const uint32_t c : results->retrieved[0]) {
    ASSERT_GE(ranks[c], threshold * (1 - GetParam().tolerance)) << c;
  }
  const StepOracle::Output expected = oracle.Attend(results->retrieved[0]);
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.out.size(); ++i) {
    error += std::pow(results->out[i] - expected.out[i], 2);
    norm += std::pow(expected.out[i], 2);
  }
  EXPECT_LE(std::sqrt(error / norm), 5e-3);
}

INSTANTIATE_TEST_SUITE_P(Rows, StepLargeRowTest,
                         testing::Values(LargeRow{"Spread", 1, 1e-3},
                                         LargeRow{"Alike", 0.01f, 1e-4}),
                         [](const auto& info) { return info.param.name; });

// Lone tokens are estimated exactly: all ranks are 0, and more keys are equal than 16 bits count.
TEST(StepLargeTest, EqualRanksGoInOrderOfTheCluster) {
  if (!HasDevice()) GTEST_SKIP() << kNoDevice;
  std::mt19937_64 random(TestSeed());
  const HeadSpec spec = Singles(16, 3000);
  const HeadProblem head = MakeHead(random, Element::kBF16, 64, spec);
  StepShape shape{.batch = 1, .kv_heads = 1, .group = 2, .head_dim = 64, .scale = 0.125f};
  shape.cluster_capacity = head.cluster_count();
  shape.segment_capacity = static_cast<uint32_t>(head.segments.size());
  shape.retrieve_capacity = spec.retrieve;
  auto batch = DeviceBatch::Make(shape, {&head, 1}, {true}, CacheSpec{}, random);
  ASSERT_TRUE(batch.ok()) << batch.status();
  // Queries of zeros: not even the rounding of a centroid gives a cluster a rank.
  ASSERT_TRUE((*batch)->SetInputs(std::vector<uint16_t>(2 * 64), {}, {}).ok());
  const auto results = (*batch)->Run(true);
  ASSERT_TRUE(results.ok()) << results.status();
  ASSERT_EQ(results->retrieved[0].size(), spec.retrieve);
  for (uint32_t c = 0; c < spec.retrieve; ++c) ASSERT_EQ(results->retrieved[0][c], c);
}

TEST(StepShapeTest, RefusesWhatNoKernelDoes) {
  const StepShape good{
      .batch = 1, .kv_heads = 1, .group = 4, .head_dim = 128, .segment_capacity = 1};
  EXPECT_TRUE(ValidateShape(good).ok());
  struct Bad {
    const char* field;
    StepShape shape;
  };
  std::vector<Bad> rows;
  const auto add = [&](const char* field, auto change) {
    rows.push_back({field, good});
    change(&rows.back().shape);
  };
  add("batch", [](StepShape* s) { s->batch = 0; });
  add("kv_heads", [](StepShape* s) { s->kv_heads = 0; });
  add("batch * kv_heads", [](StepShape* s) { s->batch = 70000; });
  add("group", [](StepShape* s) { s->group = 17; });
  add("group", [](StepShape* s) { s->group = 0; });
  add("head_dim", [](StepShape* s) { s->head_dim = 96; });
  add("cluster_capacity", [](StepShape* s) { s->cluster_capacity = 17; });
  add("cluster_capacity", [](StepShape* s) { s->cluster_capacity = 389120 + 128; });
  add("segment_capacity", [](StepShape* s) {
    s->cluster_capacity = 16;
    s->segment_capacity = 0;
  });
  add("retrieve_capacity", [](StepShape* s) { s->retrieve_capacity = 16384; });
  for (const Bad& row : rows) {
    const absl::Status status = ValidateShape(row.shape);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row.field;
    EXPECT_THAT(std::string(status.message()), testing::StartsWith(row.field));
  }
}

}  // namespace
}  // namespace wavekv::gpu
