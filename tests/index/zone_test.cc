// The zone rules as pure host functions: no backend, indexes made by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "index/zone/cluster_mass.h"
#include "index/zone/error_bound.h"
#include "index/zone/select_zones.h"
#include "index/zone/zone_plan.h"
#include "tests/index/oracle.h"

namespace wavekv {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr float kInf = std::numeric_limits<float>::infinity();

ZoneBudget Budget(BudgetKind kind, double value, uint32_t clusters_max = 0,
                  double estimate_ratio = 1) {
  return {kind, value, clusters_max, estimate_ratio, /*sketch_clusters=*/0};
}

ClusterScores Ranked(std::vector<float> rank) {
  ClusterScores scores;
  scores.cluster_count = static_cast<uint32_t>(rank.size());
  scores.group_size = 1;
  scores.logits.assign(rank.size(), 0);
  scores.mass_share = rank;
  scores.rank = std::move(rank);
  return scores;
}

ZonePlan Select(const ClusterScores& scores, const ZoneBudget& budget) {
  const std::vector<double> reaches = {0};
  const std::vector<float> steady = {-kInf};
  return SelectZones({}, scores, reaches, steady, budget);
}

struct BudgetCase {
  const char* why;
  ZoneBudget budget;
  const char* error;  // Part of the text; null: valid.
};

TEST(ValidateBudget, NamesTheFieldAndTheRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const BudgetCase cases[] = {
      {"the default", {}, nullptr},
      {"nothing at all", Budget(BudgetKind::kRatio, 0), nullptr},
      {"everything", Budget(BudgetKind::kRatio, 1), nullptr},
      {"percent given as such", Budget(BudgetKind::kRatio, 1.8), "ratio is 1.8, expected 0 to 1"},
      {"negative", Budget(BudgetKind::kRatio, -0.1), "ratio is -0.1"},
      {"NaN", Budget(BudgetKind::kRatio, nan), "ratio is nan"},
      {"no cluster", Budget(BudgetKind::kClusters, 0), nullptr},
      {"a count", Budget(BudgetKind::kClusters, 100), nullptr},
      {"half a cluster", Budget(BudgetKind::kClusters, 0.5), "expected a whole number"},
      {"more than can be counted", Budget(BudgetKind::kClusters, 1e10), "clusters is 1e+10"},
      {"coverage", Budget(BudgetKind::kCoverage, 0.95), nullptr},
      {"coverage above all", Budget(BudgetKind::kCoverage, 1.01), "coverage is 1.01"},
      {"error", Budget(BudgetKind::kError, 0.05), nullptr},
      {"error above any", Budget(BudgetKind::kError, 3), "error is 3"},
      {"error over what is not estimated", Budget(BudgetKind::kError, 0.05, 0, 0.5),
       "estimate_ratio is 0.5, expected 1 with an error budget"},
      {"estimating a part", Budget(BudgetKind::kRatio, 0.018, 0, 0.232), nullptr},
      {"estimating more than all", Budget(BudgetKind::kRatio, 0.018, 0, 2), "estimate_ratio is 2"},
      {"a kind of the future", Budget(static_cast<BudgetKind>(9), 0.5), "kind is 9"},
  };
  for (const BudgetCase& row : cases) {
    const absl::Status status = ValidateBudget(row.budget);
    if (row.error == nullptr) {
      EXPECT_TRUE(status.ok()) << row.why << ": " << status;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row.why;
      EXPECT_THAT(std::string(status.message()), HasSubstr(row.error)) << row.why;
    }
  }
}

TEST(SelectZones, RatioIsRoundedUp) {
  struct Row {
    uint32_t clusters;
    double ratio;
    uint32_t retrieved;
  };
  for (const Row& row : {Row{1000, 0.018, 18}, Row{1001, 0.018, 19}, Row{1, 0.018, 1},
                         Row{10, 0, 0}, Row{10, 1, 10}, Row{512, 0.018, 10}, Row{0, 0.5, 0}}) {
    const ZonePlan plan = Select(Ranked(std::vector<float>(row.clusters, 0.1f)),
                                 Budget(BudgetKind::kRatio, row.ratio));
    EXPECT_EQ(plan.retrieved.size(), row.retrieved) << row.clusters << " x " << row.ratio;
    EXPECT_EQ(plan.estimated.size(), row.clusters - row.retrieved);
    EXPECT_EQ(plan.ignored, 0);
  }
}

TEST(SelectZones, WithoutSketchesWhatTheyWouldServeIsRetrieved) {
  const ZoneBudget plenty = {.value = 0.05}, count = {BudgetKind::kClusters, 200};
  struct Row {
    const char* why;
    ZoneBudget budget;
    bool sketch;
    uint32_t clusters, retrieved;
  };
  const Row rows[] = {
      {"fewer than are sketched", ZoneBudget(), true, 60, 60},
      {"a seventh more than are sketched", ZoneBudget(), true, 8000, 128},
      {"a share of many", ZoneBudget(), true, 70000, 980},
      {"a budget that retrieves more", plenty, true, 70000, 3500},
      {"a sequence without sketches", ZoneBudget(), false, 70000, 350},
      {"a budget that sketches nothing", Budget(BudgetKind::kRatio, 0.005), true, 70000, 350},
      {"a count", count, true, 8000, 200},
      {"nothing at all", ZoneBudget(), true, 0, 0},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(UnsketchedRetrievalCount(row.budget, row.sketch, row.clusters), row.retrieved)
        << row.why;
  }
}

TEST(SelectZones, BestFirstAndTiesByIndex) {
  const ZonePlan plan =
      Select(Ranked({0.1f, 0.3f, 0.1f, 0.3f, 0.2f, 0.1f}), Budget(BudgetKind::kClusters, 4));
  EXPECT_THAT(plan.retrieved, ElementsAre(1, 3, 4, 0));
  EXPECT_THAT(plan.estimated, ElementsAre(2, 5));
}

// FAULTS 18: fewer clusters than asked for.
TEST(SelectZones, FewerClustersThanAskedForAreAllThereIs) {
  const ZonePlan plan = Select(Ranked({0.2f, 0.8f}), Budget(BudgetKind::kClusters, 100));
  EXPECT_THAT(plan.retrieved, ElementsAre(1, 0));
  EXPECT_THAT(plan.estimated, IsEmpty());
  EXPECT_EQ(plan.moved_to_estimation, 0);
  const ZonePlan none = Select(Ranked({}), Budget(BudgetKind::kClusters, 100));
  EXPECT_THAT(none.retrieved, IsEmpty());
}

TEST(SelectZones, NoClusterMeansEverythingIsEstimated) {
  const ZonePlan plan = Select(Ranked({0.2f, 0.8f}), Budget(BudgetKind::kClusters, 0));
  EXPECT_THAT(plan.retrieved, IsEmpty());
  EXPECT_THAT(plan.estimated, ElementsAre(0, 1));
}

TEST(SelectZones, AgreesWithAFullSort) {
  auto random = test::NewRandom(40);
  for (int round = 0; round < 50; ++round) {
    // Beyond a thousand only those that reach a threshold are sorted.
    const auto n = static_cast<uint32_t>(random() % (round % 5 == 0 ? 20000 : 300));
    std::vector<float> rank(n);
    const uint64_t different = round % 2 == 0 ? 20 : 1000000;  // Many ties, or hardly any.
    for (float& x : rank) x = static_cast<float>(random() % different);
    std::vector<uint32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return rank[a] > rank[b]; });
    const uint32_t count = n == 0 ? 0 : static_cast<uint32_t>(random() % (n + 1));
    const double estimate_ratio = round % 3 == 0 ? 1 : 0.3;
    const ZonePlan plan =
        Select(Ranked(rank), Budget(BudgetKind::kClusters, count, 0, estimate_ratio));
    EXPECT_EQ(plan.retrieved, std::vector<uint32_t>(order.begin(), order.begin() + count));
    const auto estimated = static_cast<uint32_t>(std::ceil(estimate_ratio * (n - count) - 1e-9));
    std::vector<uint32_t> next(order.begin() + count, order.begin() + count + estimated);
    std::sort(next.begin(), next.end());
    EXPECT_EQ(plan.estimated, next);
    EXPECT_EQ(plan.ignored, n - count - estimated);
  }
}

// One segment of `clusters` clusters, with sketches or without: all that the choice looks at.
SegmentHead SegmentOf(uint32_t clusters, bool sketch) {
  SegmentHead segment;
  segment.cluster_count = clusters;
  segment.radii.resize(clusters);
  segment.deltas.resize(clusters);
  segment.value_radii.resize(clusters);
  segment.sizes.assign(clusters, 1);
  if (sketch) segment.sketch.key_errors.resize(clusters);
  return segment;
}

struct SketchRow {
  std::string why;
  ZoneBudget budget;
  bool has_sketch = true;
  std::vector<uint32_t> retrieved, sketched, estimated;
  uint32_t ignored = 0;
};

TEST(SelectZones, TheBestOfTheEstimatedAreSketched) {
  const ClusterScores scores = Ranked({5, 1, 4, 2, 3});
  const auto budget = [](BudgetKind kind, double value, double estimate, uint32_t sketch) {
    return ZoneBudget{kind, value, 0, estimate, sketch};
  };
  const SketchRow rows[] = {
      {"next by rank", budget(BudgetKind::kClusters, 1, 1, 2), true, {0}, {2, 4}, {1, 3}},
      {"none are asked for", budget(BudgetKind::kClusters, 1, 1, 0), true, {0}, {}, {1, 2, 3, 4}},
      {"more than there are", budget(BudgetKind::kRatio, 0.2, 1, 9), true, {0}, {1, 2, 3, 4}, {}},
      {"never more than is estimated",
       budget(BudgetKind::kClusters, 1, 0.25, 3),
       true,
       {0},
       {2},
       {},
       3},
      {"nothing is estimated", budget(BudgetKind::kClusters, 1, 0, 3), true, {0}, {}, {}, 4},
      {"the index has none", budget(BudgetKind::kClusters, 1, 1, 2), false, {0}, {}, {1, 2, 3, 4}},
      {"the bound is that of summaries",
       budget(BudgetKind::kError, 0, 1, 2),
       true,
       {0},
       {},
       {1, 2, 3, 4}},
  };
  for (const SketchRow& row : rows) {
    SCOPED_TRACE(row.why);
    const SegmentHead segment = SegmentOf(5, row.has_sketch);
    const SegmentHead* const index[] = {&segment};
    ClusterScores scored = scores;
    scored.group_size = 1;
    scored.logits.assign(5, 0);
    scored.weights.assign(5, 1);
    scored.tops = {0};
    const std::vector<double> reaches = {1};
    const std::vector<float> steady = {0};
    const ZonePlan plan = SelectZones(index, scored, reaches, steady, row.budget);
    EXPECT_EQ(plan.retrieved, row.retrieved);
    EXPECT_EQ(plan.sketched, row.sketched);
    EXPECT_EQ(plan.estimated, row.estimated);
    EXPECT_EQ(plan.ignored, row.ignored);
  }
}

TEST(MoveTailToEstimation, IntoTheSketchIfThereIsOne) {
  ZonePlan plan;
  plan.retrieved = {9, 2, 5};
  plan.sketched = {3};
  plan.estimated = {0, 4};
  plan.can_sketch = true;
  MoveTailToEstimation(1, &plan);
  EXPECT_THAT(plan.retrieved, ElementsAre(9));
  EXPECT_THAT(plan.sketched, ElementsAre(2, 3, 5));
  EXPECT_THAT(plan.estimated, ElementsAre(0, 4));
}

TEST(SelectZones, CoverageTakesTheFewestThatHoldTheShare) {
  const ClusterScores scores = Ranked({0.05f, 0.5f, 0.05f, 0.3f, 0.1f});
  EXPECT_THAT(Select(scores, Budget(BudgetKind::kCoverage, 0.4, 5)).retrieved, ElementsAre(1));
  EXPECT_THAT(Select(scores, Budget(BudgetKind::kCoverage, 0.6, 5)).retrieved, ElementsAre(1, 3));
  EXPECT_THAT(Select(scores, Budget(BudgetKind::kCoverage, 1, 5)).retrieved,
              ElementsAre(1, 3, 4, 0, 2));
  EXPECT_THAT(Select(scores, Budget(BudgetKind::kCoverage, 0, 5)).retrieved, IsEmpty());
}

TEST(SelectZones, CoverageBeyondTheCapIsCountedAsMoved) {
  const ClusterScores scores = Ranked({0.05f, 0.5f, 0.05f, 0.3f, 0.1f});
  const ZonePlan plan = Select(scores, Budget(BudgetKind::kCoverage, 0.85, 1));
  EXPECT_THAT(plan.retrieved, ElementsAre(1));
  EXPECT_THAT(plan.estimated, ElementsAre(0, 2, 3, 4));
  EXPECT_EQ(plan.moved_to_estimation, 2);  // 3 and 4 would have been needed too.
}

TEST(SelectZones, CapIsAnEighthUnlessGiven) {
  const ClusterScores scores = Ranked(std::vector<float>(80, 1.0f));
  EXPECT_EQ(Select(scores, Budget(BudgetKind::kCoverage, 1)).retrieved.size(), 10);
  EXPECT_EQ(Select(scores, Budget(BudgetKind::kCoverage, 1, 30)).retrieved.size(), 30);
  EXPECT_EQ(Select(scores, Budget(BudgetKind::kCoverage, 1, 300)).retrieved.size(), 80);
}

TEST(MoveTailToEstimation, KeepsTheBestAndCountsTheRest) {
  ZonePlan plan;
  plan.retrieved = {9, 2, 5, 1};
  plan.estimated = {0, 3, 4, 6};
  plan.error_budget_met = true;
  MoveTailToEstimation(4, &plan);
  EXPECT_EQ(plan.moved_to_estimation, 0);
  EXPECT_TRUE(plan.error_budget_met);
  MoveTailToEstimation(1, &plan);
  EXPECT_THAT(plan.retrieved, ElementsAre(9));
  EXPECT_THAT(plan.estimated, ElementsAre(0, 1, 2, 3, 4, 5, 6));
  EXPECT_EQ(plan.moved_to_estimation, 3);
  EXPECT_FALSE(plan.error_budget_met);
  EXPECT_TRUE(plan.error_budget_capped);
}

TEST(LogSize, IsTheLogAtEverySize) {
  for (const uint16_t size : {1, 2, 16, 32, 33, 1000}) {
    EXPECT_FLOAT_EQ(LogSize(size), std::log(static_cast<float>(size)));
  }
}

}  // namespace
}  // namespace wavekv
