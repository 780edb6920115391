// The mock decoder against itself: its needles are found by exact attention, and by nothing less.

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/mock_decoder/counter_random.h"
#include "tests/mock_decoder/exact_attention.h"
#include "tests/mock_decoder/report.h"
#include "tests/mock_decoder/world.h"

namespace wavekv::mock {
namespace {

WorldConfig Config(uint64_t token_count, uint32_t needle_count, uint64_t seed) {
  WorldConfig config;
  config.token_count = token_count;
  config.needle_count = needle_count;
  config.model.seed = seed;
  return config;
}

std::unique_ptr<World> MakeWorld(const WorldConfig& config, ThreadPool* pool) {
  auto world = World::Create(config, pool);
  EXPECT_TRUE(world.ok()) << world.status().ToString();
  return std::move(world).value();
}

// splitmix64's published first outputs for the seed 1234567: the stream is what it says it is.
TEST(CounterRandom, IsSplitmix64) {
  const uint64_t seed = 1234567;
  EXPECT_EQ(Mix(seed), 6457827717110365317ull);
  EXPECT_EQ(Mix(seed + 0x9e3779b97f4a7c15ull), 3203168211198807973ull);
}

// Every scale in model.h is argued from unit variance.
TEST(CounterRandom, GaussHasUnitVariance) {
  std::vector<float> sample(1 << 16);
  FillGauss(StreamKey({7, 7}), sample.size(), 1.0f, sample.data());
  double sum = 0;
  double square_sum = 0;
  for (const float x : sample) {
    sum += x;
    square_sum += x * x;
  }
  const auto n = static_cast<double>(sample.size());
  EXPECT_NEAR(sum / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(square_sum / n, 1, 0.03);
}

// The pieces, blocks and merges of the fast attention against the definition in float64.
TEST(ExactAttention, MatchesTheDefinition) {
  ThreadPool pool(1, "test");
  ModelConfig config;
  config.dtype = DType::kF32;
  const Model model(config);
  const std::vector<uint32_t> tokens = model.BackgroundTokens(9001);
  const Context context(model, tokens, &pool);
  const std::vector<float> queries = model.Queries(2, 3, 9001);
  // One row; within a block; a piece's edge; the whole.
  for (const uint64_t count : {uint64_t{1}, uint64_t{33}, uint64_t{4096}, uint64_t{9001}}) {
    const PrefixQuery query = {queries.data(), count};
    const RowsView rows = context.Rows(2, 1);
    const ExactResult result =
        AttendExactly(rows, std::span(&query, 1), /*with_values=*/true, &pool)[0];
    double mass = 0;
    std::vector<double> out(kHeadDim);
    for (uint64_t row = 0; row < count; ++row) {
      const auto* key = reinterpret_cast<const float*>(rows.keys + row * rows.stride_bytes);
      const auto* value = reinterpret_cast<const float*>(rows.values + row * rows.stride_bytes);
      double logit = 0;
      for (uint32_t d = 0; d < kHeadDim; ++d) logit += static_cast<double>(query.query[d]) * key[d];
      const double weight = std::exp(kSoftmaxScale * logit);
      mass += weight;
      for (uint32_t d = 0; d < kHeadDim; ++d) out[d] += weight * value[d];
    }
    EXPECT_NEAR(result.lse, std::log(mass), 1e-5) << count;
    for (uint32_t d = 0; d < kHeadDim; ++d) {
      EXPECT_NEAR(result.out[d], out[d] / mass, 1e-4) << count << " " << d;
    }
  }
}

struct PlacementRow {
  uint64_t token_count;
  std::set<uint64_t> must_hold;
};

TEST(NeedlePositions, CoverTheEdges) {
  const PlacementRow rows[] = {
      // The steady zone's ends and what lies just outside; no segment boundary in reach.
      {4096, {0, 3, 4, 4031, 4032, 4095}},
      // Both sides of the only boundary.
      {8192 + 4096, {0, 3, 8191, 8192, 12287}},
      // The first boundary always, whatever the seed chooses besides.
      {131072, {0, 3, 8191, 8192, 131007, 131008, 131071}},
  };
  for (const PlacementRow& row : rows) {
    for (uint64_t seed = 1; seed < 20; ++seed) {
      const std::vector<uint64_t> positions = NeedlePositions(row.token_count, 32, seed);
      const std::set<uint64_t> distinct(positions.begin(), positions.end());
      EXPECT_EQ(distinct.size(), 32u) << seed;
      EXPECT_LT(*distinct.rbegin(), row.token_count);
      EXPECT_TRUE(std::includes(distinct.begin(), distinct.end(), row.must_hold.begin(),
                                row.must_hold.end()))
          << row.token_count << " tokens, seed " << seed;
    }
  }
}

TEST(NeedlePositions, MoveWithTheSeed) {
  EXPECT_NE(NeedlePositions(4096, 32, 1), NeedlePositions(4096, 32, 2));
  EXPECT_EQ(NeedlePositions(4096, 32, 1), NeedlePositions(4096, 32, 1));
}

struct TailRow {
  uint64_t token_count;
  uint64_t tail_start;
};

TEST(SteadyTail, FollowsTheCuttingRule) {
  const TailRow rows[] = {
      {60, 4},                          // Shorter than the local window.
      {4 + 64 + 1023, 4},               // 1,023 clusterable tokens stay exact,
      {4 + 64 + 1024, 4 + 1024},        // 1,024 are a segment.
      {8192 + 64, 8192},                // A full segment, nothing left.
      {8192 + 64 + 1023, 8192},         // The rest is too short,
      {8192 + 64 + 1024, 8192 + 1024},  // or just long enough.
      {131072, 131072 - 64},
  };
  for (const TailRow& row : rows) {
    EXPECT_EQ(SteadyTailStart(row.token_count), row.tail_start) << row.token_count;
  }
}

struct FindRow {
  uint64_t token_count;
  uint32_t needle_count;
  uint64_t seed;
  DType dtype;
};

class FindNeedles : public testing::TestWithParam<FindRow> {};

// Exact attention finds every needle, with the mass it was planted with, in every dtype.
TEST_P(FindNeedles, WithExactAttention) {
  ThreadPool pool(1, "test");
  WorldConfig config = Config(GetParam().token_count, GetParam().needle_count, GetParam().seed);
  config.model.dtype = GetParam().dtype;
  const std::unique_ptr<World> world = MakeWorld(config, &pool);
  const ExactAnswers answers = world->AnswerExactly(&pool);
  const std::vector<bool> found = FoundFacts(*world, answers.outputs);
  EXPECT_EQ(std::count(found.begin(), found.end(), true), GetParam().needle_count);
  // 16-bit keys round a logit by up to 1 %, which is up to 0.1 in the logit and 0.01 in the mass.
  EXPECT_GT(answers.needle_mass_min, kNeedleMass - 0.01);
  EXPECT_LT(answers.needle_mass_min, kNeedleMass + 0.01);
  EXPECT_GT(answers.logit_std, 1.0);
  EXPECT_LT(answers.logit_std, 3.0);
}

INSTANTIATE_TEST_SUITE_P(All, FindNeedles,
                         testing::Values(FindRow{4096, 32, 1, DType::kBF16},
                                         FindRow{4096, 32, 2, DType::kF16},
                                         FindRow{4096, 32, 3, DType::kF32},
                                         // As few tokens per needle as are allowed.
                                         FindRow{512, 32, 4, DType::kBF16}));

// A head that misses its needle must spoil the answer, or the mock decoder could not see a loss.
TEST(Decode, NeedsEveryLayerAndHead) {
  ThreadPool pool(1, "test");
  const std::unique_ptr<World> world = MakeWorld(Config(1024, 8, 5), &pool);
  const ExactAnswers answers = world->AnswerExactly(&pool);
  const std::vector<StepOutput>& outputs = answers.outputs;
  for (size_t head = 0; head < outputs[0].size() / kHeadDim; ++head) {
    std::vector<StepOutput> spoiled = outputs;
    // What attention that missed the needle would give: about a tenth of the output.
    for (uint32_t d = 0; d < kHeadDim; ++d) spoiled[0][head * kHeadDim + d] *= 0.1f;
    const std::vector<bool> found = FoundFacts(*world, spoiled);
    EXPECT_FALSE(found[0]) << "head " << head;
    EXPECT_EQ(std::count(found.begin(), found.end(), true), 7) << "head " << head;
  }
}

// One seed, one context, on any number of threads.
TEST(World, IsDeterministic) {
  ThreadPool one(0, "test");
  ThreadPool many(3, "test");
  const std::unique_ptr<World> a = MakeWorld(Config(4096, 16, 6), &one);
  const std::unique_ptr<World> b = MakeWorld(Config(4096, 16, 6), &many);
  const std::unique_ptr<World> other = MakeWorld(Config(4096, 16, 7), &many);
  const auto outputs = a->AnswerExactly(&one).outputs;
  EXPECT_EQ(outputs, b->AnswerExactly(&many).outputs);
  EXPECT_NE(outputs, other->AnswerExactly(&many).outputs);
}

struct RefusalRow {
  WorldConfig config;
  std::string field;
};

TEST(World, RefusesWhatItCannotPlant) {
  ThreadPool pool(0, "test");
  WorldConfig few_layers = Config(4096, 4, 1);
  few_layers.model.layer_count = 3;
  const RefusalRow rows[] = {
      {Config(255, 4, 1), "tokens"},
      {Config(4096, 0, 1), "needles"},
      {Config(4096, 257, 1), "needles"},  // Needles would be the background.
      {few_layers, "layers"},             // Too few digits to tell tokens apart.
  };
  for (const RefusalRow& row : rows) {
    const auto world = World::Create(row.config, &pool);
    ASSERT_FALSE(world.ok()) << row.field;
    EXPECT_EQ(world.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(world.status().message().substr(0, row.field.size()), row.field);
  }
}

}  // namespace
}  // namespace wavekv::mock
