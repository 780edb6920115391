// Decode: small segments, their re-clustering, and what readers see meanwhile.
#include <vector>

#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

constexpr double kExactTolerance = 1e-4;
constexpr ZoneBudget kAllClusters = {.kind = BudgetKind::kRatio, .value = 1.0};

class DecodeTest : public EngineTest {
 protected:
  // Ranges of the segments of layer 0, head 0.
  std::vector<std::pair<uint64_t, uint64_t>> Segments(SequenceRef sequence) {
    const auto index = engine_->DescribeIndex(kTenant, sequence, 0, 0);
    EXPECT_TRUE(index.ok()) << index.status();
    std::vector<std::pair<uint64_t, uint64_t>> ranges;
    for (const SegmentStatus& segment : index->segments) {
      ranges.emplace_back(segment.first_position, segment.first_position + segment.token_count);
    }
    return ranges;
  }
};

using Ranges = std::vector<std::pair<uint64_t, uint64_t>>;

// From a prefill with a rest, through small segments, to two re-clustered stretches; every answer
// with a full budget is exact, whatever the builder has done so far.
TEST_F(DecodeTest, SmallSegmentsBecomeStretches) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3400, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 700);
  Build(sequence);
  EXPECT_EQ(Segments(sequence), (Ranges{{4, 636}}));
  struct Stop {
    uint64_t token_count;
    Ranges segments;
  };
  const std::vector<Stop> stops = {
      {636 + 256 + 127, {{4, 636}}},
      {636 + 256 + 128, {{4, 636}, {636, 892}}},
      {1024 + 128, {{4, 1024}}},
      {1024 + 256 + 128, {{4, 1024}, {1024, 1280}}},
      {1024 + 768 + 128, {{4, 1024}, {1024, 1280}, {1280, 1536}, {1536, 1792}}},
      {2048 + 128, {{4, 1024}, {1024, 2048}}},
      {3072 + 328, {{4, 1024}, {1024, 2048}, {2048, 3072}}},
  };
  uint64_t position = 700;
  uint64_t draw = 0;
  for (const Stop& stop : stops) {
    for (; position < stop.token_count; ++position) {
      for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
        // An answer at every step costs the oracle too much.
        if (position % 97 != 0) {
          const ChunkBuffers token(data, sequence, {layer}, position, 1);
          ASSERT_TRUE(engine_->Insert(kTenant, token.chunk).ok());
          continue;
        }
        const std::vector<float> queries = RandomQueries(shape(), seed + ++draw);
        const AttendOutcome found = Decode(sequence, data, layer, position, queries);
        ASSERT_TRUE(found.status.ok()) << found.status;
        const AttendOutcome all = Attend(sequence, layer, queries, false, kAllClusters);
        EXPECT_EQ(all.counters.steady_tokens + all.counters.retrieved_tokens,
                  (position + 1) * shape().kv_head_count);
        ASSERT_LT(
            RelativeError(shape(), all.out, ExactOracle(data, layer, position + 1, queries).out),
            kExactTolerance);
      }
    }
    WaitIdle(sequence);
    EXPECT_EQ(Segments(sequence), stop.segments) << "at " << stop.token_count << " tokens";
  }
  // A BuildIndex on top gives what a fresh prefill gives.
  Build(sequence);
  const SequenceRef fresh = Create(spec_);
  Insert(fresh, data, 0, 3400);
  Build(fresh);
  EXPECT_TRUE(Fingerprint(sequence, seed) == Fingerprint(fresh, seed));
}

// A second prompt is inserted in large chunks after a BuildIndex: the same segments as by tokens.
TEST_F(DecodeTest, LargeAppendsCutAsSingleTokensDo) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  const SequenceRef at_once = Create(spec_);
  const SequenceRef stepwise = Create(spec_);
  for (const SequenceRef sequence : {at_once, stepwise}) {
    Insert(sequence, data, 0, 500);
    Build(sequence);
  }
  Insert(at_once, data, 500, 2500);
  for (uint64_t position = 500; position < 3000; ++position) Insert(stepwise, data, position, 1);
  WaitIdle(at_once);
  WaitIdle(stepwise);
  EXPECT_TRUE(Fingerprint(at_once, seed) == Fingerprint(stepwise, seed));
}

TEST_F(DecodeTest, BuildIndexTwiceIsBuildIndexOnce) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 2000, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 2000);
  const BuildProgress first = Build(sequence);
  EXPECT_GT(first.tokens_total, 0u);
  const std::string print = Fingerprint(sequence, seed);
  const BuildProgress second = Build(sequence);
  EXPECT_EQ(second.tokens_total, 0u) << "nothing is left to build";
  EXPECT_EQ(second.version, first.version);
  EXPECT_TRUE(Fingerprint(sequence, seed) == print);
}

TEST_F(DecodeTest, ProgressIsReportedAndMayStop) {
  const TokenData data(shape(), 4096, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 4096);
  std::vector<BuildProgress> seen;
  const auto built = engine_->BuildIndex(kTenant, sequence, [&](const BuildProgress& progress) {
    seen.push_back(progress);
    return true;
  });
  ASSERT_TRUE(built.ok()) << built.status();
  ASSERT_FALSE(seen.empty());
  for (size_t i = 1; i < seen.size(); ++i) {
    EXPECT_GE(seen[i].tokens_done, seen[i - 1].tokens_done);
  }
  EXPECT_TRUE(seen.back().done);
  EXPECT_EQ(seen.back().tokens_done, seen.back().tokens_total);

  const SequenceRef left = Create(spec_);
  Insert(left, data, 0, 4096);
  const auto stopped =
      engine_->BuildIndex(kTenant, left, [](const BuildProgress&) { return false; });
  EXPECT_EQ(stopped.status().code(), absl::StatusCode::kCancelled);
  WaitIdle(left);
  EXPECT_EQ(StatusOf(left).clustered_tokens, 4096u - 68) << "the build itself goes on";
}

TEST_F(DecodeTest, DenseLayersAreNeverClustered) {
  const uint64_t seed = FreshSeed();
  spec_.index.dense_layers = {0, 1};
  const TokenData data(shape(), 3000, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 3000);
  EXPECT_EQ(Build(sequence).tokens_total, 0u);
  EXPECT_EQ(StatusOf(sequence).clustered_tokens, 0u);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  EXPECT_LT(RelativeError(shape(), Attend(sequence, 0, queries).out,
                          ExactOracle(data, 0, 3000, queries).out),
            kExactTolerance);
}

}  // namespace
}  // namespace wavekv::testing
