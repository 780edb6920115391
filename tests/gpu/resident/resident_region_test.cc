// The manager of a resident region against an engine whose steps are written in C++.
#include "gpu/resident/resident_region.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "gpu/resident/unit_version.h"
#include "storage/block_cache_policy.h"
#include "tests/gpu/resident/region_harness.h"
#include "tests/index/oracle.h"

namespace wavekv::resident {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kAllClusters = 100'000;

ResidentOptions SmallOptions(double cache_ratio = 0.1, uint32_t ring_rows = 256) {
  ResidentOptions options;
  options.cache_ratio = cache_ratio;
  options.ring_rows = ring_rows;
  return options;
}

// Loads all layers of `tokens`.
void LoadAll(TestSequence* tokens, ResidentSequence* manager, uint32_t retrieve_count) {
  for (uint32_t layer = 0; layer < tokens->shape().layer_count; ++layer) {
    const absl::Status status = manager->Load(layer, tokens->View(layer, retrieve_count));
    ASSERT_TRUE(status.ok()) << status;
  }
}

TEST(ResidentRegionTest, AllClustersRetrievedIsExactAttention) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const uint32_t dim : {64u, 128u, 256u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " " << dim);
      TestSequence tokens(SmallShape(dim, dtype), dim);
      tokens.Append(1300);
      for (uint32_t layer = 0; layer < 2; ++layer) {
        tokens.Cluster(layer, 700);
        tokens.Cluster(layer, 400);
      }
      RegionHarness harness(tokens.shape(), 2048, SmallOptions());
      LoadAll(&tokens, &harness.manager(), kAllClusters);
      ReferenceStep engine = harness.Engine(tokens);
      for (int step = 0; step < 3; ++step) {
        const uint32_t layer = step % 2;
        const std::vector<float> queries = tokens.Queries();
        const StepResult result = engine.Run(layer, queries);
        EXPECT_EQ(tokens.Check(layer, harness.region(), queries, result), "");
        EXPECT_EQ(tokens.CheckExact(layer, queries, result, tokens.token_count()), "");
        ASSERT_TRUE(harness.manager().Poll().ok());
      }
      EXPECT_EQ(harness.manager().counters().violations, 0u);
    }
  }
}

TEST(ResidentRegionTest, MissedBlocksAreHitsInTheNextStep) {
  TestSequence tokens(SmallShape(), 1);
  tokens.Append(2200);
  for (uint32_t layer = 0; layer < 2; ++layer) tokens.Cluster(layer, 2000);
  RegionHarness harness(tokens.shape(), 4096, SmallOptions(0.5));
  LoadAll(&tokens, &harness.manager(), 12);
  ReferenceStep engine = harness.Engine(tokens);
  const std::vector<float> queries = tokens.Queries();
  const StepResult cold = engine.Run(0, queries);
  EXPECT_EQ(tokens.Check(0, harness.region(), queries, cold), "");
  const StepResult warm = engine.Run(0, queries);
  EXPECT_EQ(tokens.Check(0, harness.region(), queries, warm), "");
  uint64_t blocks = 0;
  for (uint32_t head = 0; head < 2; ++head) {
    EXPECT_EQ(cold.heads[head].hits(), 0u);
    EXPECT_EQ(warm.heads[head].hits(), warm.heads[head].blocks.size());
    EXPECT_EQ(warm.heads[head].retrieved.size(), 12u);
    blocks += warm.heads[head].blocks.size();
  }
  ASSERT_TRUE(harness.manager().Poll().ok());
  const ResidentCounters counters = harness.manager().counters();
  EXPECT_EQ(counters.hit_blocks, blocks);
  EXPECT_EQ(counters.miss_blocks, blocks);
  EXPECT_EQ(counters.violations, 0u);
  EXPECT_EQ(counters.log_losses, 0u);
}

// One layer, loaded, with an engine.
class LoadedRegionTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kTokens = 1200, kClustered = 1100;

  LoadedRegionTest() {
    tokens_.Append(kTokens);
    tokens_.Cluster(0, kClustered);
    const absl::Status status = manager().Load(0, tokens_.View(0, 10));
    EXPECT_TRUE(status.ok()) << status;
  }
  ResidentSequence& manager() { return harness_.manager(); }

  TestSequence tokens_{SmallShape(64, DType::kBF16, 1), 3};
  RegionHarness harness_{tokens_.shape(), 2048, SmallOptions()};
  ReferenceStep engine_ = harness_.Engine(tokens_);
};

TEST_F(LoadedRegionTest, CountsAreThoseOfTheView) {
  EXPECT_EQ(*manager().Poll(), (std::vector<uint64_t>{kTokens}));
  const gpu::HeadState state = harness_.states()[0];
  EXPECT_EQ(state.appended, kTokens);
  EXPECT_EQ(state.published, 1u);
  EXPECT_EQ(state.free_tail, harness_.header().unit.slot_count) << "all slots are on offer";
  const auto* header = reinterpret_cast<const ResidentHeader*>(harness_.region());
  EXPECT_EQ(header->sequence_id, kResidentSequence.value());
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(header), 8), "WAVERES1");
  EXPECT_EQ(header->state, kRegionOpen);
  EXPECT_EQ(manager().place().region_bytes, header->region_bytes);
}

// A round in which nothing happened is one reading of all states; one with news, a few calls for
// all units together.
TEST_F(LoadedRegionTest, RoundsAreFewCalls) {
  const TurnTakingMemory& memory = harness_.memory();
  const auto calls_of_a_round = [&] {
    const uint64_t before = memory.reads() + memory.writes();
    EXPECT_TRUE(manager().Poll().ok());
    return memory.reads() + memory.writes() - before;
  };
  EXPECT_EQ(calls_of_a_round(), 1u);
  (void)engine_.Run(0, tokens_.Queries());
  EXPECT_LE(calls_of_a_round(), 4u);
  EXPECT_EQ(calls_of_a_round(), 1u);
}

TEST_F(LoadedRegionTest, NothingIsLoadedWhileAStepIsUnderWay) {
  engine_.Begin(0);
  EXPECT_EQ(*manager().Drained(), false);
  const absl::Status refused = manager().Load(0, tokens_.View(0, 10));
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("wait for the stream"));
  const std::vector<float> queries = tokens_.Queries();
  engine_.Select(queries);
  EXPECT_EQ(tokens_.Check(0, harness_.region(), queries, engine_.Attend()), "");
  EXPECT_EQ(*manager().Drained(), true);
  EXPECT_TRUE(manager().Load(0, tokens_.View(0, 10)).ok());
}

TEST_F(LoadedRegionTest, WhatDoesNotFitLeavesWhatIsThere) {
  struct Row {
    const char* says;
    absl::StatusCode code;
    std::function<void(ResidentLayer*)> change;
  };
  const Row rows[] = {
      {"ring holds 256", absl::StatusCode::kFailedPrecondition,
       [](ResidentLayer* view) { view->token_count = view->steady_first + 257; }},
      {"room for 8", absl::StatusCode::kFailedPrecondition,
       [](ResidentLayer* view) { view->sink_count = 9, view->heads.assign(2, {}); }},
      {"load the layer anew", absl::StatusCode::kFailedPrecondition,
       [](ResidentLayer* view) { --view->steady_first, view->heads.assign(2, {}); }},
      {"load the layer anew", absl::StatusCode::kFailedPrecondition,
       [](ResidentLayer* view) { view->steady_first = kTokens + 1, view->heads.assign(2, {}); }},
  };
  for (const Row& row : rows) {
    ResidentLayer view = tokens_.View(0, 10);
    row.change(&view);
    const auto published = manager().Publish(0, view);
    EXPECT_EQ(published.status().code(), row.code) << published.status();
    EXPECT_THAT(std::string(published.status().message()), HasSubstr(row.says));
  }
  EXPECT_EQ(harness_.states()[0].published, 1u);
  const std::vector<float> queries = tokens_.Queries();
  EXPECT_EQ(tokens_.Check(0, harness_.region(), queries, engine_.Run(0, queries)), "");
}

TEST_F(LoadedRegionTest, AnIndexThatIsTooLargeIsRefused) {
  TestSequence many(tokens_.shape(), 5);
  many.Append(30 * 16 + 4);
  for (int i = 0; i < 30; ++i) many.Cluster(0, 16);
  const absl::Status refused = manager().Load(0, many.View(0, 10));
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("free are 0 segments"));
  const std::vector<float> queries = tokens_.Queries();
  EXPECT_EQ(tokens_.Check(0, harness_.region(), queries, engine_.Run(0, queries)), "");
}

TEST_F(LoadedRegionTest, AVersionWaitsForStepsOfTheOneBefore) {
  ASSERT_TRUE(manager().Poll().ok());
  engine_.Begin(0);
  tokens_.Cluster(0, 16);
  EXPECT_EQ(*manager().Publish(0, tokens_.View(0, 10)), true);
  tokens_.Cluster(0, 16);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(manager().Poll().ok());
    EXPECT_EQ(*manager().Publish(0, tokens_.View(0, 10)), false) << "a step reads the other area";
  }
  const std::vector<float> queries = tokens_.Queries();
  engine_.Select(queries);
  EXPECT_EQ(tokens_.Check(0, harness_.region(), queries, engine_.Attend()), "");
  ASSERT_TRUE(manager().Poll().ok());
  EXPECT_EQ(*manager().Publish(0, tokens_.View(0, 10)), true);
  EXPECT_EQ(tokens_.Check(0, harness_.region(), queries, engine_.Run(0, queries)), "");
}

TEST_F(LoadedRegionTest, OnlyRowsThatAreThereAreCopiedOut) {
  std::vector<std::byte> rows(300 * tokens_.shape().kv_head_count * tokens_.shape().key_bytes());
  const auto read = [&](uint64_t first, uint32_t count) {
    return manager().ReadRows(0, first, count, rows.data(), rows.data());
  };
  const uint64_t exact = tokens_.steady_first(0);
  EXPECT_TRUE(read(exact, kTokens - exact).ok());
  EXPECT_TRUE(read(kTokens, 0).ok());
  EXPECT_TRUE(absl::IsFailedPrecondition(read(exact - 1, 1))) << "it may be overwritten";
  EXPECT_TRUE(absl::IsFailedPrecondition(read(kTokens, 1))) << "it was not appended";
  EXPECT_TRUE(absl::IsFailedPrecondition(read(kTokens + 1, 0)));
  EXPECT_TRUE(absl::IsFailedPrecondition(read(~uint64_t{0}, 2)));
}

// A kernel that finds the ring full drops the token, which is counted, and goes on.
TEST_F(LoadedRegionTest, AFullRingDropsTheToken) {
  const uint64_t room = RingEnd(harness_.header().unit, tokens_.steady_first(0)) - kTokens;
  const std::vector<float> queries = tokens_.Queries();
  for (uint64_t i = 0; i <= room; ++i) {
    tokens_.Append(1);
    const StepResult result =
        engine_.Run(0, queries, tokens_.KeysAt(0, kTokens + i), tokens_.ValuesAt(0, kTokens + i));
    ASSERT_EQ(tokens_.Check(0, harness_.region(), queries, result), "");
    ASSERT_EQ(result.heads[1].overflowed, i == room);
  }
  EXPECT_EQ(*manager().Poll(), (std::vector<uint64_t>{kTokens + room}));
  EXPECT_EQ(manager().counters().overflows, 2u) << "one in each head";
  EXPECT_EQ(manager().counters().violations, 0u);
}

// Whether everything of the region is zero.
bool IsWiped(const std::byte* region, uint64_t bytes) {
  return std::all_of(region, region + bytes, [](std::byte x) { return x == std::byte{0}; });
}

TEST_F(LoadedRegionTest, CloseWipesAtOnceWhenNoStepIsUnderWay) {
  const std::byte* region = harness_.region();
  ASSERT_FALSE(IsWiped(region, harness_.header().region_bytes));
  const uint64_t free_before = harness_.buffer().free_bytes();
  manager().Close(nullptr);
  EXPECT_TRUE(IsWiped(region, harness_.header().region_bytes));
  EXPECT_GT(harness_.buffer().free_bytes(), free_before);
  EXPECT_EQ(harness_.buffer().Sweep(), 0u);
  manager().Close(nullptr);
  EXPECT_TRUE(absl::IsFailedPrecondition(manager().Poll().status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(manager().Drained().status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(manager().Load(0, tokens_.View(0, 1))));
  EXPECT_TRUE(absl::IsFailedPrecondition(manager().Publish(0, tokens_.View(0, 1)).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(manager().ReadRows(0, 1150, 1, nullptr, nullptr)));
}

TEST_F(LoadedRegionTest, CloseWaitsForAStepUnderWay) {
  const std::byte* region = harness_.region();
  const std::vector<float> queries = tokens_.Queries();
  engine_.Begin(0);
  engine_.Select(queries);
  harness_.owned().reset();  // As Close does.
  EXPECT_EQ(harness_.buffer().Sweep(), 1u);
  EXPECT_TRUE(
      absl::IsResourceExhausted(harness_.buffer().Carve(harness_.header().region_bytes).status()));
  EXPECT_EQ(tokens_.Check(0, region, queries, engine_.Attend()), "") << "all it reads is kept";
  EXPECT_FALSE(IsWiped(region, harness_.header().region_bytes));
  EXPECT_TRUE(harness_.buffer().Carve(harness_.header().region_bytes).ok()) << "it was swept";
  EXPECT_TRUE(IsWiped(region, harness_.header().region_bytes));
}

TEST_F(LoadedRegionTest, ADeadEngineIsNotWaitedFor) {
  const std::byte* region = harness_.region();
  engine_.Begin(0);
  bool gone = false;
  manager().Close([&gone] { return gone; });
  EXPECT_EQ(harness_.buffer().Sweep(), 1u);
  EXPECT_FALSE(IsWiped(region, harness_.header().region_bytes));
  gone = true;
  EXPECT_EQ(harness_.buffer().Sweep(), 0u);
  EXPECT_TRUE(IsWiped(region, harness_.header().region_bytes));
}

TEST_F(LoadedRegionTest, StepsAfterCloseAttendOverNothing) {
  engine_.Begin(0);  // Keeps the region.
  ReferenceStep late = harness_.Engine(tokens_);
  manager().Close(nullptr);
  const StepResult result = late.Run(0, tokens_.Queries());
  for (const StepHead& head : result.heads) EXPECT_EQ(head.is, StepHead::Is::kClosed);
  for (const double lse : result.lse) EXPECT_EQ(lse, -HUGE_VAL);
  for (const double x : result.out) EXPECT_EQ(x, 0);
}

// What a replay of the same look-ups through the same policy would have found, against what steps
// found with a manager that polls after each. One trace alone has a tenth less now and then.
TEST(ResidentCacheTest, HitsAreNearlyThoseOfThePolicy) {
  constexpr uint64_t kTraces = 3;
  uint64_t hits = 0, replayed_hits = 0, blocks = 0;
  for (uint64_t trace = 0; trace < kTraces; ++trace) {
    TestSequence tokens(SmallShape(64, DType::kBF16, 1), 11 + trace);
    tokens.Append(6100);
    tokens.Cluster(0, 6000);
    RegionHarness harness(tokens.shape(), 6200, SmallOptions(0.15));
    LoadAll(&tokens, &harness.manager(), 10);
    ReferenceStep engine = harness.Engine(tokens);
    const uint32_t slots = harness.header().unit.slot_count;
    auto policy = MakeLrfuBlockCachePolicy(slots);
    for (uint64_t step = 1; step <= 400; ++step) {
      const StepResult result = engine.Run(0, tokens.Queries());
      ASSERT_TRUE(harness.manager().Poll().ok());
      const StepHead& head = result.heads[0];
      hits += head.hits();
      blocks += head.blocks.size();
      for (const StepBlock& block : head.blocks) {
        const BlockKey key{1, block.block};
        if (policy->Lookup(key, step).has_value()) {
          ++replayed_hits;
        } else if (const auto slot = policy->Admit(key, step)) {
          policy->Publish(*slot);
        }
      }
    }
    EXPECT_EQ(harness.manager().counters().violations, 0u);
  }
  RecordProperty("hit_permille", static_cast<int>(1000 * hits / blocks));
  RecordProperty("replayed_permille", static_cast<int>(1000 * replayed_hits / blocks));
  EXPECT_GT(replayed_hits, blocks / 4) << "the trace is worth caching";
  EXPECT_GT(hits, replayed_hits * 9 / 10) << replayed_hits << " of " << blocks;
}

}  // namespace
}  // namespace wavekv::resident
