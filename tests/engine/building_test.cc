// What is seen while segments are clustered, with a gate that stops the builder where it matters.
#include <algorithm>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/gated_backend.h"

namespace wavekv::testing {
namespace {

constexpr double kExactTolerance = 1e-4;
constexpr ZoneBudget kAllClusters = {.kind = BudgetKind::kRatio, .value = 1.0};

class BuildingTest : public EngineTest {
 protected:
  BuildingTest() {
    spec_.shape.layer_count = 1;
    StartEngine({.epoch = 3, .build_threads = 1, .compute_threads = 2}, uint64_t{256} << 20,
                nullptr, CreateGatedBackend(gate_));
  }
  ~BuildingTest() override { gate_->Open(); }

  // Lets one segment of the single layer through, all heads.
  void AllowSegments(uint64_t count) { gate_->Allow(count * shape().kv_head_count); }
  // Waits until `version` was published.
  void WaitForVersion(SequenceRef sequence, uint64_t version) {
    while (StatusOf(sequence).version < version) std::this_thread::yield();
  }

  const std::shared_ptr<BuildGate> gate_ = std::make_shared<BuildGate>();
};

// Tokens stay exact until the version with their segment is published, and every token is in one
// zone at any moment.
TEST_F(BuildingTest, ExactUntilPublished) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 4096, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 4096);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const OracleAnswer expected = ExactOracle(data, 0, 4096, queries);
  const uint64_t heads = shape().kv_head_count;
  for (uint64_t published = 0; published <= 3; ++published) {
    if (published > 0) {
      AllowSegments(1);
      WaitForVersion(sequence, published);
    }
    ASSERT_TRUE(published == 3 || gate_->WaitForWaiter());
    const AttendOutcome all = Attend(sequence, 0, queries, false, kAllClusters);
    ASSERT_TRUE(all.status.ok()) << all.status;
    EXPECT_EQ(all.version, published);
    const uint64_t clustered = published == 0 ? 0 : published * 1024 - 4;
    EXPECT_EQ(all.counters.retrieved_tokens, clustered * heads);
    EXPECT_EQ(all.counters.steady_tokens, (4096 - clustered) * heads);
    EXPECT_LT(RelativeError(shape(), all.out, expected.out), kExactTolerance);
    EXPECT_EQ(StatusOf(sequence).clustered_tokens, clustered);
  }
}

// Small segments wait behind a slow one; the stretch that covers them comes: those that have not
// begun are never clustered.
TEST_F(BuildingTest, CoveredSmallSegmentsAreSkipped) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1200, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 200);
  Build(sequence);                   // Decode begins; nothing to cut yet.
  Insert(sequence, data, 200, 700);  // Small segments [4, 260), [260, 516), [516, 772).
  ASSERT_TRUE(gate_->WaitForWaiter());
  Insert(sequence, data, 900, 300);  // The stretch [4, 1024).
  const uint64_t before = gate_->calls();
  gate_->Open();
  WaitIdle(sequence);
  EXPECT_EQ(gate_->calls() - before, 2 * shape().kv_head_count)
      << "the small one that had begun, and the stretch";
  const SequenceRef fresh = Create(spec_);
  Insert(fresh, data, 0, 1200);
  Build(fresh);
  EXPECT_TRUE(Fingerprint(sequence, seed) == Fingerprint(fresh, seed));
}

// A segment whose tokens were truncated while it was clustered is thrown away.
TEST_F(BuildingTest, TruncatedDuringClustering) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1300, seed);
  const TokenData other(shape(), 1300, seed + 1);
  SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 1300);
  ASSERT_TRUE(gate_->WaitForWaiter());
  const auto truncated = engine_->TruncateSequence(kTenant, sequence, 1000);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  sequence.generation = truncated->generation;
  Insert(sequence, other, 1000, 300);
  gate_->Open();
  Build(sequence);
  TokenData joined(shape(), 1300, seed);
  for (uint64_t position = 1000; position < 1300; ++position) {
    for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
      std::copy_n(other.Key(0, position, head), shape().key_bytes(), joined.Key(0, position, head));
      std::copy_n(other.Value(0, position, head), shape().value_bytes(),
                  joined.Value(0, position, head));
    }
  }
  const SequenceRef fresh = Create(spec_);
  Insert(fresh, joined, 0, 1300);
  Build(fresh);
  EXPECT_TRUE(Fingerprint(sequence, seed) == Fingerprint(fresh, seed));
}

// A truncation that leaves a segment's tokens alone does not throw its clustering away, or
// speculative decoding would starve the builder.
TEST_F(BuildingTest, RollbackDuringClusteringKeepsIt) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1300, seed);
  SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 1024 + 128 + 10);
  ASSERT_TRUE(gate_->WaitForWaiter());
  const auto truncated = engine_->TruncateSequence(kTenant, sequence, 1024 + 64);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  sequence.generation = truncated->generation;
  AllowSegments(1);
  WaitIdle(sequence);
  EXPECT_EQ(gate_->calls(), shape().kv_head_count);
  EXPECT_EQ(StatusOf(sequence).clustered_tokens, 1020u);
}

TEST_F(BuildingTest, DroppedDuringClustering) {
  const TokenData data(shape(), 4096, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 4096);
  ASSERT_TRUE(gate_->WaitForWaiter());
  ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  EXPECT_EQ(engine_->GetSequence(kTenant, sequence).status().code(), absl::StatusCode::kNotFound);
  EXPECT_GT(pool_->Usage().reserved_bytes, 0u) << "the builder still reads";
  gate_->Allow(1);
  while (pool_->Usage().reserved_bytes > 0) std::this_thread::yield();
  EXPECT_EQ(gate_->calls(), 1u) << "given up at the next head";
}

TEST_F(BuildingTest, DropEndsAWaitingBuildIndex) {
  const TokenData data(shape(), 4096, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 4096);
  ASSERT_TRUE(gate_->WaitForWaiter());
  const auto built = engine_->BuildIndex(kTenant, sequence, [&](const BuildProgress& progress) {
    EXPECT_FALSE(progress.done);
    EXPECT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
    return true;
  });
  EXPECT_EQ(built.status().code(), absl::StatusCode::kAborted) << built.status();
}

// A failed build leaves the tokens exact; BuildIndex says why, and the next one tries again.
TEST_F(BuildingTest, FailedBuildIsReportedAndRetried) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 2048, seed);
  const SequenceRef sequence = Create(spec_);
  gate_->Fail(true);
  gate_->Open();
  Insert(sequence, data, 0, 2048);
  const auto failed = engine_->BuildIndex(kTenant, sequence, nullptr);
  EXPECT_EQ(failed.status().code(), absl::StatusCode::kInternal) << failed.status();
  const std::vector<float> queries = RandomQueries(shape(), seed);
  EXPECT_LT(RelativeError(shape(), Attend(sequence, 0, queries).out,
                          ExactOracle(data, 0, 2048, queries).out),
            kExactTolerance);
  gate_->Fail(false);
  Build(sequence);
  EXPECT_EQ(StatusOf(sequence).clustered_tokens, 2048u - 68);
}

// What failed had begun before the call, so the call's own try is still to come.
TEST_F(BuildingTest, AFailureOfAnEarlierTryIsNotTheCalls) {
  const TokenData data(shape(), 2048, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 2048);
  ASSERT_TRUE(gate_->WaitForWaiter());
  gate_->Fail(true);
  bool failed = false;
  const auto built = engine_->BuildIndex(kTenant, sequence, [&](const BuildProgress&) {
    if (failed) return true;
    gate_->Allow(1);
    EXPECT_TRUE(gate_->WaitForCall());
    gate_->Fail(false);
    gate_->Open();
    failed = true;
    return true;
  });
  EXPECT_TRUE(built.ok()) << built.status();
  EXPECT_TRUE(failed);
  EXPECT_EQ(StatusOf(sequence).clustered_tokens, 2048u - 68);
}

// With a full queue the tokens stay exact, and a later BuildIndex catches up.
TEST_F(BuildingTest, FullBuildQueue) {
  const uint64_t seed = FreshSeed();
  StartEngine({.epoch = 3, .build_threads = 1, .compute_threads = 1, .build_queue_max = 1},
              uint64_t{256} << 20, nullptr, CreateGatedBackend(gate_));
  const TokenData data(shape(), 1200, seed);
  std::vector<SequenceRef> sequences;
  for (int i = 0; i < 3; ++i) {
    sequences.push_back(Create(spec_));
    Insert(sequences.back(), data, 0, 1200);
    if (i > 0) continue;
    ASSERT_TRUE(gate_->WaitForWaiter());  // One runs, one waits, one finds no room.
  }
  const auto refused = engine_->BuildIndex(kTenant, sequences[2], nullptr);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnavailable) << refused.status();
  const std::vector<float> queries = RandomQueries(shape(), seed);
  EXPECT_LT(RelativeError(shape(), Attend(sequences[2], 0, queries).out,
                          ExactOracle(data, 0, 1200, queries).out),
            kExactTolerance);
  gate_->Open();
  WaitIdle(sequences[0]);
  WaitIdle(sequences[1]);
  Build(sequences[2]);
  EXPECT_TRUE(Fingerprint(sequences[2], seed) == Fingerprint(sequences[0], seed));
}

// The engine may end with a segment half done.
TEST_F(BuildingTest, EngineEndsDuringABuild) {
  const TokenData data(shape(), 4096, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 4096);
  ASSERT_TRUE(gate_->WaitForWaiter());
  std::thread opener([&] { gate_->Open(); });
  engine_.reset();
  opener.join();
  EXPECT_EQ(pool_->Usage().reserved_bytes, 0u);
}

}  // namespace
}  // namespace wavekv::testing
