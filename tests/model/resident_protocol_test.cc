// Every interleaving of engine, manager, truncation, new versions and deaths, in small: nothing
// goes wrong by the rules, and each rule is needed.

#include <ostream>
#include <string>

#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/model/block_cache_model.h"
#include "tests/model/resident_region_model.h"
#include "tests/model/steady_ring_model.h"

namespace wavekv::testing {
namespace {

std::string TraceOf(const Exploration& found) {
  return found.problem + "\n  " + absl::StrJoin(found.trace, "\n  ");
}

TEST(BlockCacheProtocolTest, HoldsInEveryInterleaving) {
  const Exploration found = Explore(BlockCacheModel({}));
  EXPECT_EQ(found.problem, "") << TraceOf(found);
  EXPECT_GT(found.state_count, 10000u) << "the model does little";
  printf("%zu\n", found.state_count);
}

TEST(SteadyRingProtocolTest, HoldsInEveryInterleaving) {
  const Exploration found = Explore(SteadyRingModel({}));
  EXPECT_EQ(found.problem, "") << TraceOf(found);
  EXPECT_GT(found.state_count, 1000u) << "the model does little";
}

TEST(ResidentRegionProtocolTest, HoldsInEveryInterleaving) {
  const Exploration found = Explore(ResidentRegionModel({}));
  EXPECT_EQ(found.problem, "") << TraceOf(found);
  EXPECT_GT(found.state_count, 10000u) << "the model does little";
  printf("%zu\n", found.state_count);
}

template <class Rules>
struct LeftOut {
  const char* name;
  bool Rules::*rule;
  const char* problem;

  friend void PrintTo(const LeftOut& row, std::ostream* out) { *out << row.name; }
};

using CacheRule = LeftOut<BlockCacheModel::Rules>;
class BlockCacheRuleTest : public ::testing::TestWithParam<CacheRule> {};

TEST_P(BlockCacheRuleTest, IsNeeded) {
  BlockCacheModel::Rules rules;
  rules.*GetParam().rule = false;
  const Exploration found = Explore(BlockCacheModel(rules));
  EXPECT_THAT(found.problem, ::testing::HasSubstr(GetParam().problem)) << TraceOf(found);
  EXPECT_FALSE(found.trace.empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, BlockCacheRuleTest,
    ::testing::Values(
        CacheRule{"StepStartsBeforeItReads", &BlockCacheModel::Rules::step_starts_before_it_reads,
                  "version was replaced"},
        CacheRule{"FilledBeforePublished", &BlockCacheModel::Rules::filled_before_published,
                  "another block"},
        CacheRule{"LooksAtStartedAfterUnpublishing",
                  &BlockCacheModel::Rules::looks_at_started_after_unpublishing, "another block"},
        CacheRule{"SlotWaitsForCompleted", &BlockCacheModel::Rules::slot_waits_for_completed,
                  "another block"},
        CacheRule{"UnpublishesInEveryArea", &BlockCacheModel::Rules::unpublishes_in_every_area,
                  "another block"},
        CacheRule{"AreaWaitsForCompleted", &BlockCacheModel::Rules::area_waits_for_completed,
                  "version was replaced"}),
    [](const auto& info) { return info.param.name; });

using RingRule = LeftOut<SteadyRingModel::Rules>;
class SteadyRingRuleTest : public ::testing::TestWithParam<RingRule> {};

TEST_P(SteadyRingRuleTest, IsNeeded) {
  SteadyRingModel::Rules rules;
  rules.*GetParam().rule = false;
  const Exploration found = Explore(SteadyRingModel(rules));
  EXPECT_THAT(found.problem, ::testing::HasSubstr(GetParam().problem)) << TraceOf(found);
  EXPECT_FALSE(found.trace.empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, SteadyRingRuleTest,
    ::testing::Values(RingRule{"AppendWaitsForIndex",
                               &SteadyRingModel::Rules::append_waits_for_index, "not its token's"},
                      RingRule{"TruncateDrains", &SteadyRingModel::Rules::truncate_drains, "not "},
                      RingRule{"CopyChecksGeneration",
                               &SteadyRingModel::Rules::copy_checks_generation, "not the tokens'"},
                      RingRule{"IndexIsOfCopiedRows",
                               &SteadyRingModel::Rules::index_is_of_copied_rows,
                               "not the tokens'"}),
    [](const auto& info) { return info.param.name; });

using RegionRules = ResidentRegionModel::Rules;
using RegionRule = LeftOut<RegionRules>;
class ResidentRegionRuleTest : public ::testing::TestWithParam<RegionRule> {};

TEST_P(ResidentRegionRuleTest, IsNeeded) {
  RegionRules rules;
  rules.*GetParam().rule = false;
  const Exploration found = Explore(ResidentRegionModel(rules));
  EXPECT_THAT(found.problem, ::testing::HasSubstr(GetParam().problem)) << TraceOf(found);
  EXPECT_FALSE(found.trace.empty());
}

INSTANTIATE_TEST_SUITE_P(
    All, ResidentRegionRuleTest,
    ::testing::Values(
        RegionRule{"NumberWaitsForCompleted", &RegionRules::number_waits_for_completed, "a"},
        RegionRule{"NumberWaitsForLog", &RegionRules::number_waits_for_log, "a"},
        RegionRule{"NumberWaitsForDoubts", &RegionRules::number_waits_for_doubts, "a"},
        RegionRule{"LogIsOfTheNextReading", &RegionRules::log_is_of_the_next_reading, "a"},
        RegionRule{"LateClaimLeavesTheTable", &RegionRules::late_claim_leaves_the_table, "a"},
        RegionRule{"DoubtWaitsForCompleted", &RegionRules::doubt_waits_for_completed, "a"},
        RegionRule{"LappedLogIsNoticed", &RegionRules::lapped_log_is_noticed, "a"},
        RegionRule{"ClaimsNameTheirPlace", &RegionRules::claims_name_their_place, "nobody finds"},
        RegionRule{"StepsClearBeforeTheyLook", &RegionRules::steps_clear_before_they_look, "a"},
        RegionRule{"StepsClaimWhatTheyCleared", &RegionRules::steps_claim_what_they_cleared, "a"}),
    [](const auto& info) { return info.param.name; });

// The checker itself: it finds what is there, and the shortest way to it.
struct Counter {
  struct State {
    uint8_t value;
  };
  uint8_t wrong_at, end;

  State Initial() const { return {0}; }
  void Next(const State& state, Moves<State>* moves) const {
    if (state.value < end) moves->Add("one", {static_cast<uint8_t>(state.value + 1)});
    if (state.value + 2 <= end) moves->Add("two", {static_cast<uint8_t>(state.value + 2)});
  }
  const char* Violation(const State& state) const {
    return state.value == wrong_at ? "wrong" : nullptr;
  }
  bool MayEnd(const State& state) const { return state.value == 10; }
};

TEST(StateSpaceTest, FindsTheShortestWayToWhatIsWrong) {
  const Exploration found = Explore(Counter{5, 10});
  EXPECT_EQ(found.problem, "wrong");
  EXPECT_EQ(found.trace.size(), 3u);
  EXPECT_EQ(Explore(Counter{11, 10}).problem, "");
  EXPECT_EQ(Explore(Counter{11, 10}).state_count, 11u);
  EXPECT_EQ(Explore(Counter{11, 9}).problem, "nothing can happen any more");
}

}  // namespace
}  // namespace wavekv::testing
