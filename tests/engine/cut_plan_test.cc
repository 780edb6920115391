#include "daemon/engine/cut_plan.h"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace wavekv {

// Failure messages.
void PrintTo(const TokenRange& range, std::ostream* os) {
  *os << "[" << range.begin << ", " << range.end << ")";
}

namespace {

using Ranges = std::vector<TokenRange>;

constexpr CutRules kRules = {.segment_tokens = 1024, .small_segment_tokens = 256};

struct AppendCase {
  std::string what;
  bool decoding;
  Ranges planned;
  uint64_t token_count;
  Ranges expected;
};

TEST(CutPlanTest, CutsAfterAppend) {
  const std::vector<AppendCase> cases = {
      {"no tokens", false, {}, 0, {}},
      {"prefill: one token short of local window and roll-back reserve", false, {}, 1151, {}},
      {"prefill: a whole stretch", false, {}, 1152, {{4, 1024}}},
      {"prefill: never a small segment", false, {{4, 1024}}, 2175, {}},
      {"prefill: two stretches in one append", false, {}, 2200, {{4, 1024}, {1024, 2048}}},
      {"prefill: the first is planned already", false, {{4, 1024}}, 2200, {{1024, 2048}}},
      {"decode: one token short of a small segment", true, {}, 4 + 256 + 127, {}},
      {"decode: a small segment", true, {}, 4 + 256 + 128, {{4, 260}}},
      {"decode: several small segments at once", true, {}, 4 + 512 + 128, {{4, 260}, {260, 516}}},
      {"decode: from the end of a rest segment on",
       true,
       {{4, 500}},
       500 + 256 + 128,
       {{500, 756}}},
      {"decode: a stretch replaces its small segments",
       true,
       {{4, 260}, {260, 516}, {516, 772}},
       1152,
       {{4, 1024}}},
      {"decode: a stretch, then small segments of the next",
       true,
       {{4, 260}},
       1024 + 512 + 128,
       {{4, 1024}, {1024, 1280}, {1280, 1536}}},
      {"decode: the second stretch begins on its boundary",
       true,
       {{4, 1024}, {1024, 1280}, {1280, 1536}, {1536, 1792}},
       2176,
       {{1024, 2048}}},
  };
  for (const AppendCase& c : cases) {
    EXPECT_EQ(CutsAfterAppend(kRules, c.decoding, c.planned, c.token_count), c.expected) << c.what;
  }
}

struct BuildCase {
  std::string what;
  Ranges planned;
  uint64_t token_count;
  Ranges expected;
};

TEST(CutPlanTest, CutsForBuild) {
  const std::vector<BuildCase> cases = {
      {"no tokens", {}, 0, {}},
      {"fewer than the local window", {}, 63, {}},
      {"a rest one token too short", {}, 4 + 255 + 64, {}},
      {"the shortest rest", {}, 4 + 256 + 64, {{4, 260}}},
      {"a rest up to the local window", {}, 1000, {{4, 936}}},
      {"a stretch that ends on the local window", {}, 1024 + 64, {{4, 1024}}},
      {"one token short of it: a rest", {}, 1024 + 63, {{4, 1023}}},
      {"stretches and a rest", {}, 2048 + 500, {{4, 1024}, {1024, 2048}, {2048, 2484}}},
      {"stretches and a short rest, which stays exact", {}, 2048 + 300, {{4, 1024}, {1024, 2048}}},
      {"what is there is not built again", {{4, 1024}, {1024, 1980}}, 1980 + 64, {}},
      {"small segments become one rest",
       {{4, 1024}, {1024, 1280}, {1280, 1536}},
       1700,
       {{1024, 1636}}},
      {"a rest that grew", {{4, 900}}, 1000, {{4, 936}}},
      {"a rest that became a stretch", {{4, 900}}, 1200, {{4, 1024}}},
      {"the same single small segment", {{4, 260}}, 324, {}},
  };
  for (const BuildCase& c : cases) {
    EXPECT_EQ(CutsForBuild(kRules, c.planned, c.token_count), c.expected) << c.what;
  }
}

TEST(CutPlanTest, RangesKept) {
  const Ranges planned = {{4, 1024}, {1024, 2048}, {2048, 2304}};
  EXPECT_EQ(RangesKept(planned, 2304 + 64), 3u);
  EXPECT_EQ(RangesKept(planned, 2304 + 63), 2u) << "the local window stays exact";
  EXPECT_EQ(RangesKept(planned, 1500), 1u);
  EXPECT_EQ(RangesKept(planned, 1024 + 63), 0u);
  EXPECT_EQ(RangesKept(planned, 0), 0u);
}

TEST(CutPlanTest, ApplyCutReplacesFromItsBeginOn) {
  PlannedRanges planned;
  ApplyCut({4, 260}, &planned);
  ApplyCut({260, 516}, &planned);
  ApplyCut({4, 1024}, &planned);
  ApplyCut({1024, 1280}, &planned);
  EXPECT_EQ(planned, (Ranges{{4, 1024}, {1024, 1280}}));
  EXPECT_EQ(PlannedEnd(planned), 1280u);
  EXPECT_EQ(PlannedEnd({}), kSinkTokens);
}

// However the tokens arrive, the same segments are there in the end: every append plans what it
// can, and a later one catches up.
TEST(CutPlanTest, ArrivalDoesNotMatter) {
  for (const bool decoding : {false, true}) {
    for (const uint64_t total : {100u, 700u, 1151u, 1152u, 1700u, 4000u}) {
      PlannedRanges at_once;
      for (const TokenRange& cut : CutsAfterAppend(kRules, decoding, {}, total)) {
        ApplyCut(cut, &at_once);
      }
      for (const uint64_t step : {1u, 7u, 130u, 1000u}) {
        PlannedRanges stepwise;
        for (uint64_t count = 0; count < total;) {
          count = std::min(count + step, total);
          for (const TokenRange& cut : CutsAfterAppend(kRules, decoding, stepwise, count)) {
            ApplyCut(cut, &stepwise);
          }
        }
        EXPECT_EQ(stepwise, at_once) << "total " << total << " step " << step;
        for (const TokenRange& cut : CutsForBuild(kRules, stepwise, total)) {
          ApplyCut(cut, &stepwise);
        }
        PlannedRanges built;
        for (const TokenRange& cut : CutsForBuild(kRules, {}, total)) ApplyCut(cut, &built);
        EXPECT_EQ(stepwise, built) << "BuildIndex after " << total << " by " << step;
      }
    }
  }
}

// No cut is called impossible, whatever was appended, built and truncated before.
TEST(CutPlanTest, MayBeCutKnowsEveryCut) {
  std::mt19937_64 random(std::random_device{}());
  const auto below = [&random](uint64_t bound) { return random() % bound; };
  for (int walk = 0; walk < 200; ++walk) {
    PlannedRanges planned;
    bool decoding = false;
    uint64_t count = 0;
    std::string story;
    const auto apply = [&](const std::vector<TokenRange>& cuts) {
      for (const TokenRange& cut : cuts) {
        ASSERT_TRUE(MayBeCut(kRules, planned, cut)) << ::testing::PrintToString(cut) << story;
        ApplyCut(cut, &planned);
      }
    };
    for (int step = 0; step < 60; ++step) {
      switch (below(4)) {
        case 0:
          count += below(700);
          story += "\nappended, now " + std::to_string(count);
          break;
        case 1:
          apply(CutsForBuild(kRules, planned, count));
          decoding = true;
          story += "\nbuilt";
          break;
        case 2:
          count -= std::min(count, below(below(4) == 0 ? 1500 : 200));
          if (!planned.empty() && below(2) == 0) {  // So that a segment has just the window behind.
            count = std::min(count, planned[below(planned.size())].end + kLocalTokens);
          }
          planned.resize(RangesKept(planned, count));
          story += "\ntruncated to " + std::to_string(count);
          break;
        default:
          for (const TokenRange& cut :
               CutsForBuild(kRules, planned, count + below(2) * below(1500))) {
            ASSERT_TRUE(MayBeCut(kRules, planned, cut)) << ::testing::PrintToString(cut) << story;
          }
          continue;
      }
      apply(CutsAfterAppend(kRules, decoding, planned, count));
    }
  }
}

// What crosses a boundary, is short, or is cut already.
TEST(CutPlanTest, MayBeCutKnowsWhatCannotBe) {
  for (const TokenRange& range : Ranges{{0, 1024},
                                        {3, 1024},
                                        {4, 1025},
                                        {1000, 1300},
                                        {4, 259},
                                        {4, 4},
                                        {300, 100},
                                        {1024, 4096}}) {
    EXPECT_FALSE(MayBeCut(kRules, {}, range)) << ::testing::PrintToString(range);
  }
  // A stretch that is no longer than a small segment: the first lacks the sink.
  EXPECT_TRUE(MayBeCut({1024, 1024}, {}, {4, 1024}));
  const PlannedRanges planned = {{4, 1024}, {1024, 1280}, {1280, 1536}};
  for (const TokenRange& range : planned) EXPECT_FALSE(MayBeCut(kRules, planned, range));
  EXPECT_FALSE(MayBeCut(kRules, planned, {1024, 1500}));
  EXPECT_FALSE(MayBeCut(kRules, planned, {1270, 1536})) << "begins with none";
  EXPECT_TRUE(MayBeCut(kRules, planned, {1024, 1536})) << "after a truncation to 1,600";
  EXPECT_TRUE(MayBeCut(kRules, planned, {1024, 2048}));
  EXPECT_TRUE(MayBeCut(kRules, planned, {1536, 1792}));
}

// A speculation of up to kRollbackTokens tokens dissolves no segment that an append has cut.
TEST(CutPlanTest, RollbackKeepsSegments) {
  for (uint64_t count = 0; count < 4000; ++count) {
    PlannedRanges planned;
    for (const TokenRange& cut : CutsAfterAppend(kRules, true, {}, count)) ApplyCut(cut, &planned);
    if (count < kRollbackTokens) continue;
    ASSERT_EQ(RangesKept(planned, count - kRollbackTokens), planned.size()) << count;
  }
}

}  // namespace
}  // namespace wavekv
