// Properties: the true mass lies between the bounds, the true error under the error bound, and no
// planted needle is missed, over random and clustered keys in all dtypes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "index/backend/cpu_backend.h"
#include "index/zone/cluster_mass.h"
#include "index/zone/error_bound.h"
#include "tests/index/oracle.h"

namespace wavekv {
namespace {

using test::BuiltSegment;
using test::Gaussian;
using test::NewRandom;
using test::StoredRows;

constexpr float kInf = std::numeric_limits<float>::infinity();

// Keys, values and a group's queries of one KV head, indexed in one segment.
struct Head {
  StoredRows keys, values;
  BuiltSegment built;
  std::vector<const SegmentHead*> index;
  std::vector<float> queries;
  GroupQuery query;
  ClusterScores scores;

  std::span<const float> head_query(uint32_t g) const {
    return std::span<const float>(queries).subspan(size_t{g} * query.key_dim, query.key_dim);
  }
};

// Independent values, or with a small `spread` nearly equal ones.
std::vector<float> ValuesOf(std::mt19937_64& random, uint32_t tokens, uint32_t dim, float spread) {
  const std::vector<float> common(dim, 1 - spread);
  std::vector<float> values = Gaussian(random, size_t{tokens} * dim, spread);
  for (size_t i = 0; i < values.size(); ++i) values[i] += common[i % dim];
  return values;
}

// `key_size` scales the keys, `query_size` the queries, both of about 1 in each dimension.
std::unique_ptr<Head> MakeHead(ComputeBackend& backend, std::mt19937_64& random, DType dtype,
                               uint32_t tokens, uint32_t dim, bool topics, float key_size,
                               double query_size, float value_spread = 1) {
  const uint32_t group = 2;
  auto head = std::make_unique<Head>();
  std::vector<float> keys = topics ? test::TopicKeys(random, tokens, dim, tokens / 32 + 1, 4, 0.5)
                                   : Gaussian(random, size_t{tokens} * dim);
  for (float& x : keys) x *= key_size;
  head->keys = test::Store(dtype, dim, keys);
  head->values = test::Store(dtype, dim, ValuesOf(random, tokens, dim, value_spread));
  head->built = test::Build(backend, head->keys, head->values);
  head->index = {&head->built.head};
  head->queries = Gaussian(random, size_t{group} * dim, query_size);
  head->query = {head->queries, group, dim, dim, dtype, 1 / std::sqrt(static_cast<float>(dim))};
  EXPECT_TRUE(
      backend
          .RankClusters(head->index, head->query, std::vector<float>(group, -kInf), &head->scores)
          .ok());
  return head;
}

// True log mass of each cluster for one query head.
std::vector<double> TrueLogMasses(const Head& head, uint32_t g) {
  const std::vector<double> scores =
      test::ExactScores(head.head_query(g), head.keys.floats, head.query.scale);
  const SegmentHead& segment = head.built.head;
  std::vector<double> masses;
  for (uint32_t c = 0; c < segment.cluster_count; ++c) {
    std::vector<double> members;
    for (uint32_t row = segment.first_row[c]; row < segment.first_row[c + 1]; ++row) {
      members.push_back(scores[segment.row_to_offset[row]]);
    }
    masses.push_back(test::LogSumExp(members));
  }
  return masses;
}

struct BoundCase {
  const char* why;
  uint32_t tokens;
  uint32_t dim;
  bool topics;
  float key_size;
  double query_size;
};

constexpr BoundCase kBoundCases[] = {
    {"random keys", 800, 64, false, 1, 1},
    {"clustered keys", 800, 64, true, 1, 1},
    {"sharp queries: scores of +-80", 800, 64, true, 1, 10},
    {"flat queries", 800, 64, false, 1, 1e-3},
    {"large keys, FAULTS 23", 800, 64, true, 1000, 1},
    {"small keys", 800, 64, false, 1e-3f, 10},
    {"odd dim", 500, 47, true, 1, 2},
    {"largest dim", 500, 256, true, 1, 1},
    {"one token: nothing but rounding between the bounds", 1, 64, false, 1, 3},
    {"three tokens", 3, 64, false, 1, 3},
};

class BoundsTest : public testing::TestWithParam<std::tuple<const simd::Kernels*, DType>> {};

TEST_P(BoundsTest, TrueMassLiesBetween) {
  auto backend = CreateCpuBackend(*std::get<0>(GetParam()));
  auto random = NewRandom(50);
  for (const BoundCase& row : kBoundCases) {
    SCOPED_TRACE(row.why);
    const auto head = MakeHead(*backend, random, std::get<1>(GetParam()), row.tokens, row.dim,
                               row.topics, row.key_size, row.query_size);
    const SegmentHead& segment = head->built.head;
    // All clusters, each alone, and random subsets.
    std::vector<std::vector<uint32_t>> sets(1);
    for (uint32_t c = 0; c < segment.cluster_count; ++c) {
      sets[0].push_back(c);
      sets.push_back({c});
    }
    for (int i = 0; i < 10; ++i) {
      sets.emplace_back();
      for (uint32_t c = 0; c < segment.cluster_count; ++c) {
        if (random() % 3 == 0) sets.back().push_back(c);
      }
    }
    const std::vector<double> masses[2] = {TrueLogMasses(*head, 0), TrueLogMasses(*head, 1)};
    for (const std::vector<uint32_t>& set : sets) {
      EstimatedAttention estimate;
      ASSERT_TRUE(
          backend->EstimateClusters(head->index, set, head->query, head->scores, true, &estimate)
              .ok());
      for (uint32_t g = 0; g < 2; ++g) {
        std::vector<double> chosen;
        for (const uint32_t c : set) chosen.push_back(masses[g][c]);
        const double truth = test::LogSumExp(chosen);
        ASSERT_LE(estimate.lse_lower[g], truth) << set.size() << " clusters";
        ASSERT_GE(estimate.lse_upper[g], truth) << set.size() << " clusters";
        ASSERT_FALSE(std::isnan(estimate.lse_upper[g]));
      }
    }
  }
}

// The bounds must say something: a lone key's mass is known to rounding.
TEST_P(BoundsTest, AreTightForOneToken) {
  const DType dtype = std::get<1>(GetParam());
  auto backend = CreateCpuBackend(*std::get<0>(GetParam()));
  auto random = NewRandom(51);
  const auto head = MakeHead(*backend, random, dtype, 1, 64, false, 1, 1);
  const std::vector<uint32_t> only = {0};
  EstimatedAttention estimate;
  ASSERT_TRUE(
      backend->EstimateClusters(head->index, only, head->query, head->scores, true, &estimate)
          .ok());
  EXPECT_LT(estimate.lse_upper[0] - estimate.lse_lower[0], 1e-3);
}

INSTANTIATE_TEST_SUITE_P(EveryLevel, BoundsTest,
                         testing::Combine(testing::ValuesIn(simd::AvailableKernels()),
                                          testing::Values(DType::kF32, DType::kF16, DType::kBF16)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)->isa) +
                                  std::string(DTypeName(std::get<1>(info.param)));
                         });

std::vector<double> Reaches(const Head& head) {
  std::vector<double> reaches;
  for (uint32_t g = 0; g < head.query.group_size; ++g) {
    reaches.push_back(QueryReach(head.head_query(g), head.query.scale));
  }
  return reaches;
}

// What a plan gives, and how far it is from the truth in lengths of the longest value.
double TrueError(ComputeBackend& backend, const Head& head, const ZonePlan& plan,
                 const StoredRows& steady_keys, const StoredRows& steady_values) {
  PartialAttention output, part;
  EstimatedAttention estimate;
  const RowRun steady = {steady_keys.bytes.data(), steady_values.bytes.data(), steady_keys.count()};
  EXPECT_TRUE(backend.AttendRows(std::span(&steady, 1), head.query, &output).ok());
  EXPECT_TRUE(backend.AttendClusters(head.index, plan.retrieved, head.query, &part).ok());
  EXPECT_TRUE(
      backend
          .EstimateClusters(head.index, plan.estimated, head.query, head.scores, false, &estimate)
          .ok());
  MergePartial(part, &output);
  MergePartial(estimate.attention, &output);
  std::vector<float> keys = head.keys.floats, values = head.values.floats;
  keys.insert(keys.end(), steady_keys.floats.begin(), steady_keys.floats.end());
  values.insert(values.end(), steady_values.floats.begin(), steady_values.floats.end());
  const uint32_t dim = head.query.value_dim;
  double longest = 0, worst = 0;
  for (size_t i = 0; i < values.size() / dim; ++i) {
    double squared = 0;
    for (uint32_t j = 0; j < dim; ++j) squared += values[i * dim + j] * values[i * dim + j];
    longest = std::max(longest, std::sqrt(squared));
  }
  for (uint32_t g = 0; g < head.query.group_size; ++g) {
    const test::ExactAttention exact =
        test::Attend(head.head_query(g), keys, values, dim, head.query.scale);
    double squared = 0;
    for (uint32_t j = 0; j < dim; ++j)
      squared += std::pow(output.out[g * dim + j] - exact.out[j], 2);
    worst = std::max(worst, std::sqrt(squared));
  }
  return worst / longest;
}

TEST(ErrorBudget, TrueErrorIsUnderTheBoundAndTheBoundUnderTheBudget) {
  auto backend = CreateCpuBackend();
  auto random = NewRandom(52);
  int met = 0, capped = 0;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const bool topics : {true, false}) {
      // Independent values under sharp queries cannot be bounded well, nearly equal ones can.
      for (const auto& [query_size, spread] :
           {std::pair{2.0, 1.0f}, {0.5, 1.0f}, {0.1, 0.1f}, {0.02, 0.01f}}) {
        const auto head = MakeHead(*backend, random, dtype, 700, 64, topics, 1, query_size, spread);
        const StoredRows steady_keys = test::Store(dtype, 64, Gaussian(random, 30 * 64));
        const StoredRows steady_values = test::Store(dtype, 64, ValuesOf(random, 30, 64, spread));
        PartialAttention steady;
        const RowRun rows = {steady_keys.bytes.data(), steady_values.bytes.data(), 30};
        ASSERT_TRUE(backend->AttendRows(std::span(&rows, 1), head->query, &steady).ok());
        for (const double budget : {0.02, 0.2, 0.8}) {
          const auto plan = backend->SelectZones(head->index, head->query, head->scores, steady.lse,
                                                 {BudgetKind::kError, budget, 0, 1});
          ASSERT_TRUE(plan.ok());
          ASSERT_NE(plan->error_budget_met, plan->error_budget_capped);
          const double bound =
              BoundErrors(head->index, head->scores, Reaches(*head), steady.lse, plan->retrieved)
                  .back();
          EXPECT_LE(TrueError(*backend, *head, *plan, steady_keys, steady_values), bound + 1e-5)
              << DTypeName(dtype) << " query size " << query_size << " budget " << budget;
          if (plan->error_budget_met) {
            ++met;
            EXPECT_LE(bound, budget);
          } else {
            ++capped;
            EXPECT_EQ(plan->retrieved.size(), (head->scores.cluster_count + 7) / 8);
          }
        }
      }
    }
  }
  EXPECT_GT(met, 0);
  EXPECT_GT(capped, 0);
}

TEST(ErrorBudget, BoundIsZeroWhenNothingIsEstimatedAndNeverAboveTwoLengths) {
  auto backend = CreateCpuBackend();
  auto random = NewRandom(53);
  const auto head = MakeHead(*backend, random, DType::kBF16, 400, 64, true, 1, 2);
  std::vector<uint32_t> order(head->scores.cluster_count);
  std::iota(order.begin(), order.end(), 0);
  const std::vector<float> steady = {-kInf, -kInf};
  const std::vector<double> bounds =
      BoundErrors(head->index, head->scores, Reaches(*head), steady, order);
  EXPECT_EQ(bounds.back(), 0);
  for (const double bound : bounds) {
    EXPECT_GE(bound, 0);
    EXPECT_LE(bound, 2.1);
  }
}

TEST(ErrorBudget, MoreIsRetrievedForLessError) {
  auto backend = CreateCpuBackend();
  auto random = NewRandom(54);
  const auto head = MakeHead(*backend, random, DType::kBF16, 2000, 64, true, 1, 0.2);
  const std::vector<float> steady = {-kInf, -kInf};
  size_t previous = 0;
  for (const double budget : {0.9, 0.5, 0.2, 0.1, 0.01}) {
    const auto plan =
        backend->SelectZones(head->index, head->query, head->scores, steady,
                             {BudgetKind::kError, budget, head->scores.cluster_count, 1});
    ASSERT_TRUE(plan.ok());
    EXPECT_TRUE(plan->error_budget_met) << "everything may be retrieved";
    EXPECT_GE(plan->retrieved.size(), previous);
    previous = plan->retrieved.size();
  }
  EXPECT_GT(previous, 1);
}

// A background key plus the shortest component along the group's queries that gives it 0.9 of the
// attention of the weakest of 4 heads.
void Plant(std::vector<float>* keys, uint32_t dim, uint32_t token, std::span<const float> queries) {
  const auto group = static_cast<uint32_t>(queries.size() / dim);
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  std::vector<double> direction(dim, 0);
  double squared = 0;
  for (uint32_t j = 0; j < dim; ++j) {
    for (uint32_t g = 0; g < group; ++g) direction[j] += queries[g * dim + j];
    squared += direction[j] * direction[j];
  }
  double length = 0;
  for (uint32_t g = 0; g < group; ++g) {
    const auto query = queries.subspan(size_t{g} * dim, dim);
    std::vector<double> scores = test::ExactScores(query, *keys, scale);
    double per_length = 0;
    for (uint32_t j = 0; j < dim; ++j)
      per_length += scale * query[j] * direction[j] / std::sqrt(squared);
    const double own = scores[token];
    scores[token] = -kInf;
    length = std::max(length, (test::LogSumExp(scores) + std::log(9.0) - own) / per_length);
  }
  for (uint32_t j = 0; j < dim; ++j) {
    (*keys)[size_t{token} * dim + j] +=
        static_cast<float>(length * direction[j] / std::sqrt(squared));
  }
}

TEST(Needles, AreAllRetrievedAtTheDefaultBudget) {
  auto backend = CreateCpuBackend();
  auto random = NewRandom(55);
  const uint32_t tokens = 8192, dim = 64, group = 4, needles = 16;
  for (const bool topics : {true, false}) {
    std::vector<float> keys = topics ? test::TopicKeys(random, tokens, dim, 256, 4, 0.5)
                                     : Gaussian(random, size_t{tokens} * dim);
    std::vector<std::vector<float>> questions;
    std::vector<uint32_t> positions;
    for (uint32_t i = 0; i < needles; ++i) {
      // 80 % of each head's length is common to the group.
      const std::vector<float> shared = Gaussian(random, dim, 0.8);
      std::vector<float> queries = Gaussian(random, size_t{group} * dim, 0.6);
      for (uint32_t at = 0; at < queries.size(); ++at) queries[at] += shared[at % dim];
      // The first, the last, both sides of the middle, and any.
      const uint32_t edges[] = {0, tokens - 1, tokens / 2 - 1, tokens / 2};
      positions.push_back(i < 4 ? edges[i] : static_cast<uint32_t>(random() % tokens));
      Plant(&keys, dim, positions.back(), queries);
      questions.push_back(std::move(queries));
    }
    const StoredRows stored = test::Store(DType::kBF16, dim, keys);
    const StoredRows values =
        test::Store(DType::kBF16, dim, Gaussian(random, size_t{tokens} * dim));
    const BuiltSegment built = test::Build(*backend, stored, values);
    const std::vector<const SegmentHead*> index = {&built.head};
    for (uint32_t i = 0; i < needles; ++i) {
      const GroupQuery query = {questions[i], group, dim, dim, DType::kBF16, 0.125f};
      ClusterScores scores;
      ASSERT_TRUE(
          backend->RankClusters(index, query, std::vector<float>(group, -kInf), &scores).ok());
      const auto plan = backend->SelectZones(index, query, scores, std::vector<float>(group, -kInf),
                                             ZoneBudget{});
      ASSERT_TRUE(plan.ok());
      const auto& offsets = built.head.row_to_offset;
      const auto row = std::find(offsets.begin(), offsets.end(), positions[i]) - offsets.begin();
      const auto& first_row = built.head.first_row;
      const auto cluster = static_cast<uint32_t>(
          std::upper_bound(first_row.begin(), first_row.end(), row) - first_row.begin() - 1);
      // Alone in its cluster, it is kept by the estimate, which is then its own key and value.
      if (built.head.sizes[cluster] == 1) continue;
      EXPECT_THAT(plan->retrieved, testing::Contains(cluster))
          << (topics ? "topics" : "random") << ", needle " << i << " at " << positions[i];
    }
  }
}

}  // namespace
}  // namespace wavekv
