// The CPU backend's attention, ranking and estimation against float64, at every level.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <numeric>

#include "index/backend/cpu_backend.h"
#include "index/zone/cluster_mass.h"
#include "tests/index/oracle.h"

namespace wavekv {
namespace {

using test::BuiltSegment;
using test::Gaussian;
using test::NewRandom;
using test::StoredRows;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct ShapeCase {
  const char* name;
  uint32_t group;
  uint32_t key_dim;
  uint32_t value_dim;
  DType dtype;
};

// Two segments and a few loose rows of one KV head, and a group's queries.
struct World {
  StoredRows keys[2], values[2];
  BuiltSegment built[2];
  StoredRows steady_keys, steady_values;
  std::vector<const SegmentHead*> index;
  std::vector<float> queries;
  GroupQuery query;

  std::span<const float> head_query(uint32_t g) const {
    return std::span<const float>(queries).subspan(size_t{g} * query.key_dim, query.key_dim);
  }
};

std::vector<float> NoSteady(const World& world) {
  return std::vector<float>(world.query.group_size, -kInf);
}

// Every stored centroid or value mean: [clusters, dim].
std::vector<double> StoredRowsOf(const SegmentHead& segment,
                                 std::vector<double> (*row)(const SegmentHead&, uint32_t)) {
  std::vector<double> rows;
  for (uint32_t c = 0; c < segment.cluster_count; ++c) {
    const std::vector<double> one = row(segment, c);
    rows.insert(rows.end(), one.begin(), one.end());
  }
  return rows;
}

// scale * q . row of each row.
std::vector<double> ScoresOf(std::span<const float> query, std::span<const double> rows,
                             double scale) {
  std::vector<double> scores(rows.size() / query.size(), 0);
  for (size_t at = 0; at < rows.size(); ++at) {
    scores[at / query.size()] += scale * query[at % query.size()] * rows[at];
  }
  return scores;
}

// Kernels::estimate_log_masses of one cluster.
double ExpectedLogMass(double score, double size, double variance) {
  const double deviation = std::sqrt(variance), reached = std::sqrt(2 * std::log(size));
  const double gain = deviation <= reached ? variance / 2 : deviation * reached - std::log(size);
  return score + std::log(size) + std::min(gain, deviation) / 2;
}

// How far a score may be from exact: half a step of the query's codes in every dim.
double ScoreTolerance(const World& world, uint32_t g, const SegmentHead& segment) {
  const std::vector<double> reach = {QueryReach(world.head_query(g), world.query.scale)};
  return ScoreSlack(segment, reach[0]);
}

// The rank of each cluster by its definition (ComputeBackend::RankClusters), from the tokens
// themselves, in double. `steady_lse` [group_size]; `shares` [clusters] is filled with each
// cluster's share of the clusters' estimated mass, summed over the group.
std::vector<double> ExactRanks(const World& world, std::span<const float> steady_lse,
                               std::vector<double>* shares) {
  std::vector<double> ranks;
  const double scale = world.query.scale;
  for (uint32_t g = 0; g < world.query.group_size; ++g) {
    std::vector<double> masses, deviations;
    for (const SegmentHead* segment : world.index) {
      const uint32_t n = segment->token_count, dim = segment->key_dim,
                     value_dim = segment->value_dim;
      const auto floats = [](DType dtype, const void* from, size_t count) {
        std::vector<float> to(count);
        ConvertToFloat(dtype, from, count, to.data());
        return to;
      };
      const auto keys = floats(segment->payload_dtype, segment->keys, size_t{n} * dim);
      const auto values = floats(segment->payload_dtype, segment->values, size_t{n} * value_dim);
      const std::vector<double> centroids = StoredRowsOf(*segment, StoredCentroid);
      const std::vector<double> means = StoredRowsOf(*segment, StoredValueMean);
      std::vector<double> spread(segment->cluster_count, 0),
          value_spread(segment->cluster_count, 0);
      std::vector<double> dim_spread(dim, 0);
      double all_spread = 0;
      for (uint32_t c = 0; c < segment->cluster_count; ++c) {
        for (uint32_t r = segment->first_row[c]; r < segment->first_row[c + 1]; ++r) {
          for (uint32_t j = 0; j < dim; ++j) {
            const double d = keys[r * dim + j] - centroids[c * dim + j];
            spread[c] += d * d / segment->sizes[c];
            dim_spread[j] += d * d;
            all_spread += d * d;
          }
          for (uint32_t j = 0; j < value_dim; ++j) {
            const double d = values[r * value_dim + j] - means[c * value_dim + j];
            value_spread[c] += d * d / segment->sizes[c];
          }
        }
      }
      double seen = 0;
      for (uint32_t j = 0; j < dim; ++j) {
        seen += std::pow(world.head_query(g)[j], 2) * dim_spread[j] / all_spread;
      }
      const auto logits = ScoresOf(world.head_query(g), centroids, scale);
      for (uint32_t c = 0; c < segment->cluster_count; ++c) {
        const double v = scale * scale * seen * spread[c];
        masses.push_back(ExpectedLogMass(logits[c], segment->sizes[c], v));
        deviations.push_back(test::TailFactor(std::min(v, 64.0)) * std::sqrt(1 - std::exp(-v)) *
                             std::sqrt(value_spread[c] / segment->sizes[c]));
      }
    }
    ranks.resize(masses.size(), 0);
    shares->resize(masses.size(), 0);
    const double clusters = test::LogSumExp(masses);
    const double whole =
        test::LogSumExp(std::vector<double>{clusters, static_cast<double>(steady_lse[g])});
    for (size_t c = 0; c < masses.size(); ++c) {
      (*shares)[c] += std::exp(masses[c] - clusters);
      ranks[c] += std::exp(masses[c] - whole) * deviations[c];
    }
  }
  return ranks;
}

std::unique_ptr<World> MakeWorld(ComputeBackend& backend, const ShapeCase& shape,
                                 std::mt19937_64& random, double query_size = 1) {
  auto world = std::make_unique<World>();
  const uint32_t counts[2] = {700, 300};
  for (int s = 0; s < 2; ++s) {
    world->keys[s] =
        test::Store(shape.dtype, shape.key_dim,
                    s == 0 ? test::TopicKeys(random, counts[s], shape.key_dim, 20, 4, 0.5)
                           : Gaussian(random, size_t{counts[s]} * shape.key_dim));
    world->values[s] = test::Store(shape.dtype, shape.value_dim,
                                   Gaussian(random, size_t{counts[s]} * shape.value_dim));
    world->built[s] = test::Build(backend, world->keys[s], world->values[s]);
    world->index.push_back(&world->built[s].head);
  }
  world->steady_keys =
      test::Store(shape.dtype, shape.key_dim, Gaussian(random, 70 * shape.key_dim));
  world->steady_values =
      test::Store(shape.dtype, shape.value_dim, Gaussian(random, 70 * shape.value_dim));
  world->queries = Gaussian(random, size_t{shape.group} * shape.key_dim, query_size);
  world->query = {world->queries,  shape.group, shape.key_dim,
                  shape.value_dim, shape.dtype, 1 / std::sqrt(static_cast<float>(shape.key_dim))};
  return world;
}

// Rows of `clusters` as floats, from the payload.
void AppendClusterRows(const World& world, std::span<const uint32_t> clusters,
                       std::vector<float>* keys, std::vector<float>* values) {
  for (const uint32_t cluster : clusters) {
    const RowRun run = ClusterRows(world.index, cluster);
    for (auto [out, bytes, dim] : {std::tuple{keys, run.keys, world.query.key_dim},
                                   std::tuple{values, run.values, world.query.value_dim}}) {
      const size_t count = size_t{run.row_count} * dim, first = out->size();
      out->resize(first + count);
      ConvertToFloat(world.query.payload_dtype, bytes, count, out->data() + first);
    }
  }
}

void ExpectAttention(const World& world, const PartialAttention& found, std::span<const float> keys,
                     std::span<const float> values) {
  ASSERT_EQ(found.lse.size(), world.query.group_size);
  ASSERT_EQ(found.out.size(), size_t{world.query.group_size} * world.query.value_dim);
  for (uint32_t g = 0; g < world.query.group_size; ++g) {
    const test::ExactAttention exact =
        test::Attend(world.head_query(g), keys, values, world.query.value_dim, world.query.scale);
    // float32 scores of size 10 err by 1e-6 or so each; exponentials and sums keep that size.
    EXPECT_NEAR(found.lse[g], exact.lse, 2e-5) << "head " << g;
    EXPECT_LT(test::RelativeError(std::span<const float>(found.out).subspan(
                                      size_t{g} * world.query.value_dim, world.query.value_dim),
                                  exact.out),
              2e-5)
        << "head " << g;
  }
}

double Length(std::span<const double> x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

class AttentionTest : public testing::TestWithParam<std::tuple<const simd::Kernels*, ShapeCase>> {
 protected:
  void SetUp() override {
    backend_ = CreateCpuBackend(*std::get<0>(GetParam()));
    random_ = NewRandom(30);
    world_ = MakeWorld(*backend_, shape(), random_);
    ASSERT_TRUE(
        backend_->RankClusters(world_->index, world_->query, NoSteady(*world_), &scores_).ok());
  }
  const ShapeCase& shape() const { return std::get<1>(GetParam()); }

  std::unique_ptr<ComputeBackend> backend_;
  std::mt19937_64 random_;
  std::unique_ptr<World> world_;
  ClusterScores scores_;
};

TEST_P(AttentionTest, CapsNameTheLevel) {
  EXPECT_EQ(backend_->Caps().name, "cpu");
  EXPECT_EQ(backend_->Caps().isa, std::get<0>(GetParam())->isa);
}

TEST_P(AttentionTest, AttendRowsMatchesDouble) {
  PartialAttention found;
  const RowRun rows = {world_->steady_keys.bytes.data(), world_->steady_values.bytes.data(), 70};
  const RowRun segment = {world_->built[0].keys.data(), world_->built[0].values.data(), 700};
  ASSERT_TRUE(backend_->AttendRows(std::vector{rows, segment}, world_->query, &found).ok());
  std::vector<float> keys = world_->steady_keys.floats, values = world_->steady_values.floats;
  keys.insert(keys.end(), world_->keys[0].floats.begin(), world_->keys[0].floats.end());
  values.insert(values.end(), world_->values[0].floats.begin(), world_->values[0].floats.end());
  ExpectAttention(*world_, found, keys, values);
}

// Steady rows of a chunked prefill lie in other runs than those of one shot.
TEST_P(AttentionTest, AttendRowsDoesNotDependOnHowRowsLie) {
  const size_t key_bytes = shape().key_dim * DTypeBytes(shape().dtype);
  const size_t value_bytes = shape().value_dim * DTypeBytes(shape().dtype);
  const std::byte* keys = world_->built[0].keys.data();
  const std::byte* values = world_->built[0].values.data();
  PartialAttention whole, parts;
  ASSERT_TRUE(
      backend_->AttendRows(std::vector<RowRun>{{keys, values, 700}}, world_->query, &whole).ok());
  std::vector<RowRun> runs;
  for (uint32_t row = 0; row < 700;) {
    const uint32_t count = std::min<uint32_t>(700 - row, random_() % 200);  // Empty ones too.
    runs.push_back({keys + row * key_bytes, values + row * value_bytes, count});
    row += count;
  }
  ASSERT_TRUE(backend_->AttendRows(runs, world_->query, &parts).ok());
  EXPECT_EQ(whole.out, parts.out);
  EXPECT_EQ(whole.lse, parts.lse);
}

TEST_P(AttentionTest, AttendClustersMatchesDouble) {
  std::vector<uint32_t> clusters(scores_.cluster_count);
  std::iota(clusters.begin(), clusters.end(), 0);
  std::shuffle(clusters.begin(), clusters.end(), random_);
  clusters.resize(17);
  PartialAttention found;
  ASSERT_TRUE(backend_->AttendClusters(world_->index, clusters, world_->query, &found).ok());
  std::vector<float> keys, values;
  AppendClusterRows(*world_, clusters, &keys, &values);
  ExpectAttention(*world_, found, keys, values);
}

TEST_P(AttentionTest, ScoresAndSharesMatchDouble) {
  ASSERT_EQ(scores_.cluster_count, ClusterCount(world_->index));
  for (uint32_t g = 0; g < shape().group; ++g) {
    size_t flat = g * scores_.cluster_count;
    for (const SegmentHead* segment : world_->index) {
      const double tolerance = ScoreTolerance(*world_, g, *segment);
      EXPECT_LT(tolerance, 0.01);
      for (const double logit :
           ScoresOf(world_->head_query(g), StoredRowsOf(*segment, StoredCentroid),
                    world_->query.scale)) {
        ASSERT_NEAR(scores_.logits[flat++], logit, tolerance);
      }
    }
  }
  std::vector<double> shares;
  ExactRanks(*world_, NoSteady(*world_), &shares);
  for (size_t c = 0; c < shares.size(); ++c) {
    // Scores err by up to a few 1e-4, and masses in proportion.
    ASSERT_NEAR(scores_.mass_share[c], shares[c], 1e-3 * shares[c] + 1e-9);
  }
}

TEST_P(AttentionTest, RanksByTheExpectedErrorOfAnEstimate) {
  // Heads with much, little and no mass in the steady zone.
  std::vector<float> steady = NoSteady(*world_);
  for (uint32_t g = 0; g < shape().group; ++g) {
    if (g % 3 != 2) steady[g] = g % 3 == 0 ? 9.0f : 2.0f;
  }
  ClusterScores scores;
  ASSERT_TRUE(backend_->RankClusters(world_->index, world_->query, steady, &scores).ok());
  std::vector<double> shares;
  const std::vector<double> ranks = ExactRanks(*world_, steady, &shares);
  for (size_t c = 0; c < ranks.size(); ++c) {
    // Scores err by up to a few 1e-4; exp(v) is taken to third order.
    ASSERT_NEAR(scores.rank[c], ranks[c], 0.025 * ranks[c] + 1e-9) << "cluster " << c;
  }
  uint32_t flat = 0;
  for (const SegmentHead* segment : world_->index) {
    for (const uint16_t size : segment->sizes) {
      // What its summary describes exactly, but for the codes' steps, need not be read.
      if (size == 1) {
        EXPECT_LT(scores.rank[flat], 1e-2 * shares[flat] + 1e-9);
      }
      ++flat;
    }
  }
}

TEST_P(AttentionTest, EstimateMatchesItsFormulaAndItsBoundsHoldTheTruth) {
  // All but a few, as after a selection: runs of every length, over the segments' boundary.
  std::vector<uint32_t> clusters;
  for (uint32_t c = 0; c < scores_.cluster_count; ++c) {
    if (random_() % 7 != 0) clusters.push_back(c);
  }
  EstimatedAttention found;
  ASSERT_TRUE(
      backend_->EstimateClusters(world_->index, clusters, world_->query, scores_, true, &found)
          .ok());
  std::vector<float> keys, values;
  AppendClusterRows(*world_, clusters, &keys, &values);
  for (uint32_t g = 0; g < shape().group; ++g) {
    // The formula in double: one pseudo-token for each cluster.
    std::vector<double> logits;
    std::vector<std::vector<double>> means;
    double longest = 0;
    for (const uint32_t cluster : clusters) {
      const auto [segment_idx, c] = LocateCluster(world_->index, cluster);
      logits.push_back(std::log(double{scores_.weights[g * scores_.cluster_count + cluster]}) +
                       scores_.tops[g]);
      means.push_back(StoredValueMean(*world_->index[segment_idx], c));
      longest = std::max(longest, Length(means.back()));
    }
    const double lse = test::LogSumExp(logits);
    std::vector<double> out(shape().value_dim, 0);
    for (size_t i = 0; i < logits.size(); ++i) {
      for (uint32_t j = 0; j < shape().value_dim; ++j)
        out[j] += std::exp(logits[i] - lse) * means[i][j];
    }
    EXPECT_NEAR(found.attention.lse[g], lse, 1e-5);
    for (uint32_t j = 0; j < shape().value_dim; ++j) {
      out[j] -= found.attention.out[size_t{g} * shape().value_dim + j];
    }
    // What was left unread counts as the segment's mean value, which is no longer than any.
    EXPECT_LT(Length(out), 2 * kUnreadShareMax * longest);
    const double truth =
        test::LogSumExp(test::ExactScores(world_->head_query(g), keys, world_->query.scale));
    EXPECT_LE(found.lse_lower[g], truth);
    EXPECT_GE(found.lse_upper[g], truth);
    EXPECT_LE(found.lse_lower[g], found.attention.lse[g]);
    EXPECT_GE(found.lse_upper[g], found.attention.lse[g]);
  }
}

TEST_P(AttentionTest, ZonesMergedAreExactWhenEverythingIsRetrieved) {
  PartialAttention total, part;
  const RowRun steady = {world_->steady_keys.bytes.data(), world_->steady_values.bytes.data(), 70};
  ASSERT_TRUE(backend_->AttendRows(std::span(&steady, 1), world_->query, &total).ok());
  std::vector<uint32_t> all(scores_.cluster_count);
  std::iota(all.begin(), all.end(), 0);
  ASSERT_TRUE(backend_->AttendClusters(world_->index, all, world_->query, &part).ok());
  MergePartial(part, &total);
  std::vector<float> keys = world_->steady_keys.floats, values = world_->steady_values.floats;
  AppendClusterRows(*world_, all, &keys, &values);
  ExpectAttention(*world_, total, keys, values);
}

// GQA with any group, MHA (a group of one) and MQA (all query heads in one group).
constexpr ShapeCase kShapes[] = {
    {"Mha", 1, 64, 64, DType::kBF16},          {"Group2", 2, 128, 128, DType::kF16},
    {"Group3", 3, 64, 64, DType::kF32},        {"Group4", 4, 128, 128, DType::kBF16},
    {"Group7", 7, 80, 96, DType::kF16},        {"Group8", 8, 64, 128, DType::kBF16},
    {"Mqa16", 16, 128, 64, DType::kBF16},      {"OddDims", 3, 33, 47, DType::kF32},
    {"OddDims16Bit", 5, 61, 35, DType::kBF16}, {"Smallest", 4, 32, 32, DType::kF16},
    {"Largest", 4, 256, 256, DType::kBF16},
};

INSTANTIATE_TEST_SUITE_P(EveryLevel, AttentionTest,
                         testing::Combine(testing::ValuesIn(simd::AvailableKernels()),
                                          testing::ValuesIn(kShapes)),
                         [](const auto& info) {
                           std::string isa = std::get<0>(info.param)->isa;
                           std::erase(isa, '_');
                           return isa + std::get<1>(info.param).name;
                         });

// FAULTS 22: nothing retrieved, nothing estimated, nothing steady.
TEST(EmptyAttention, IsZeroWithoutMassAndTheIdentity) {
  auto backend = CreateCpuBackend();
  auto random = NewRandom(31);
  const auto world = MakeWorld(*backend, kShapes[3], random);
  ClusterScores scores, no_scores;
  ASSERT_TRUE(backend->RankClusters(world->index, world->query, NoSteady(*world), &scores).ok());
  ASSERT_TRUE(backend->RankClusters({}, world->query, NoSteady(*world), &no_scores).ok());
  EXPECT_EQ(no_scores.cluster_count, 0);
  PartialAttention rows, clusters;
  EstimatedAttention estimate, estimate_of_nothing;
  ASSERT_TRUE(backend->AttendRows({}, world->query, &rows).ok());
  ASSERT_TRUE(backend->AttendClusters(world->index, {}, world->query, &clusters).ok());
  ASSERT_TRUE(
      backend->EstimateClusters(world->index, {}, world->query, scores, true, &estimate).ok());
  ASSERT_TRUE(
      backend->EstimateClusters({}, {}, world->query, no_scores, true, &estimate_of_nothing).ok());
  for (const PartialAttention& empty :
       {rows, clusters, estimate.attention, estimate_of_nothing.attention}) {
    EXPECT_THAT(empty.out, testing::AllOf(testing::SizeIs(4 * 128), testing::Each(0.0f)));
    EXPECT_THAT(empty.lse, testing::AllOf(testing::SizeIs(4), testing::Each(-kInf)));
  }
  EXPECT_THAT(estimate.lse_lower, testing::AllOf(testing::SizeIs(4), testing::Each(-kInf)));
  EXPECT_THAT(estimate.lse_upper, testing::AllOf(testing::SizeIs(4), testing::Each(-kInf)));

  PartialAttention both = rows;
  MergePartial(clusters, &both);
  EXPECT_EQ(both.out, rows.out);
  EXPECT_EQ(both.lse, rows.lse);

  PartialAttention some;
  const std::vector<uint32_t> first = {0, 1};
  ASSERT_TRUE(backend->AttendClusters(world->index, first, world->query, &some).ok());
  PartialAttention left = some, right = rows;
  MergePartial(rows, &left);
  MergePartial(some, &right);
  for (const PartialAttention& merged : {left, right}) {
    EXPECT_EQ(merged.out, some.out);
    EXPECT_EQ(merged.lse, some.lse);
  }
}

// A zone far below the clusters outside of it keeps its own digits.
TEST(EstimateClusters, OfAZoneWithoutMassBesideOthers) {
  for (const simd::Kernels* kernels : simd::AvailableKernels()) {
    auto backend = CreateCpuBackend(*kernels);
    auto random = NewRandom(35);
    const auto world = MakeWorld(*backend, kShapes[3], random, 40);
    ClusterScores scores;
    ASSERT_TRUE(backend->RankClusters(world->index, world->query, NoSteady(*world), &scores).ok());
    for (uint32_t g = 0; g < 4; ++g) {
      const float* logits = &scores.logits[g * scores.cluster_count];
      std::vector<uint32_t> order(scores.cluster_count);
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(),
                [&](uint32_t a, uint32_t b) { return logits[a] < logits[b]; });
      const std::vector<uint32_t> zone = {std::min(order[0], order[1]),
                                          std::max(order[0], order[1])};
      ASSERT_LT(logits[order[1]], logits[order.back()] - 60) << "the case is about a wide gap";
      EstimatedAttention found;
      ASSERT_TRUE(
          backend->EstimateClusters(world->index, zone, world->query, scores, true, &found).ok());
      EXPECT_GE(found.attention.lse[g], found.lse_lower[g]);
      EXPECT_LE(found.attention.lse[g], found.lse_upper[g]);
      double squared = 0;
      for (uint32_t j = 0; j < 128; ++j) squared += std::pow(found.attention.out[g * 128 + j], 2);
      EXPECT_GT(squared, 0.01) << "a mean of values of length 11";
    }
  }
}

// FAULTS 23: scores of +-80 and of thousands.
TEST(LargeScores, StayFiniteAndWithinTheRoundingOfTheirSize) {
  for (const simd::Kernels* kernels : simd::AvailableKernels()) {
    auto backend = CreateCpuBackend(*kernels);
    for (const double query_size : {10.0, 100.0, 10000.0}) {
      auto random = NewRandom(32);
      const auto world = MakeWorld(*backend, kShapes[3], random, query_size);
      PartialAttention found;
      const RowRun rows = {world->built[1].keys.data(), world->built[1].values.data(), 300};
      ASSERT_TRUE(backend->AttendRows(std::span(&rows, 1), world->query, &found).ok());
      ClusterScores scores;
      ASSERT_TRUE(
          backend->RankClusters(world->index, world->query, NoSteady(*world), &scores).ok());
      for (const float rank : scores.rank) ASSERT_TRUE(std::isfinite(rank));
      std::vector<uint32_t> all(scores.cluster_count);
      std::iota(all.begin(), all.end(), 0);
      EstimatedAttention estimate;
      ASSERT_TRUE(
          backend->EstimateClusters(world->index, all, world->query, scores, true, &estimate).ok());
      for (uint32_t g = 0; g < 4; ++g) {
        const auto query = world->head_query(g);
        const std::vector<double> exact =
            test::ExactScores(query, world->keys[1].floats, world->query.scale);
        EXPECT_NEAR(found.lse[g], test::LogSumExp(exact), 1e-5 * query_size);
        std::vector<double> every = exact;
        const std::vector<double> others =
            test::ExactScores(query, world->keys[0].floats, world->query.scale);
        every.insert(every.end(), others.begin(), others.end());
        EXPECT_LE(estimate.lse_lower[g], test::LogSumExp(every));
        EXPECT_GE(estimate.lse_upper[g], test::LogSumExp(every));
        EXPECT_TRUE(std::isfinite(estimate.lse_upper[g]));
      }
      for (const float x : found.out) ASSERT_TRUE(std::isfinite(x));
      for (const float x : estimate.attention.out) ASSERT_TRUE(std::isfinite(x));
    }
  }
}

TEST(MergePartial, IsTheAttentionOfBothSets) {
  auto random = NewRandom(33);
  const uint32_t dim = 64;
  const std::vector<float> query = Gaussian(random, dim), keys = Gaussian(random, 100 * dim),
                           values = Gaussian(random, 100 * dim);
  const auto part = [&](size_t first, size_t count) {
    const test::ExactAttention exact =
        test::Attend(query, std::span(keys).subspan(first * dim, count * dim),
                     std::span(values).subspan(first * dim, count * dim), dim, 0.5);
    return PartialAttention{{exact.out.begin(), exact.out.end()}, {static_cast<float>(exact.lse)}};
  };
  PartialAttention merged = part(0, 30);
  MergePartial(part(30, 70), &merged);
  const test::ExactAttention whole = test::Attend(query, keys, values, dim, 0.5);
  EXPECT_NEAR(merged.lse[0], whole.lse, 1e-5);
  EXPECT_LT(test::RelativeError(merged.out, whole.out), 1e-5);
}

TEST(FlatClusters, AreNumberedThroughTheSegments) {
  SegmentHead a, b, empty;
  a.cluster_count = 3;
  b.cluster_count = 2;
  const std::vector<const SegmentHead*> index = {&a, &empty, &b};
  EXPECT_EQ(ClusterCount(index), 5);
  EXPECT_EQ(LocateCluster(index, 2).segment_idx, 0);
  EXPECT_EQ(LocateCluster(index, 2).cluster_idx, 2);
  EXPECT_EQ(LocateCluster(index, 3).segment_idx, 2);
  EXPECT_EQ(LocateCluster(index, 3).cluster_idx, 0);
}

TEST(SegmentHead, CountsItsBytes) {
  auto backend = CreateCpuBackend();
  auto random = NewRandom(34);
  const StoredRows rows = test::Store(DType::kBF16, 64, Gaussian(random, 1000 * 64));
  const BuiltSegment built = test::Build(*backend, rows, rows);
  const uint64_t clusters = built.head.cluster_count;
  const uint64_t panels = (clusters + 15) / 16;
  EXPECT_EQ(built.head.rank_read_bytes(), panels * 16 * 64 + clusters * 4 * 4 + 2 * 64 * 4);
  const uint64_t unsketched = built.head.rank_read_bytes() + clusters * (64 + 4 + 2 + 3 * 4) +
                              64 * 4 + 2 * (clusters + 1) * 4 + 1000 * 2;
  EXPECT_EQ(built.head.index_bytes(), unsketched + 1000 * 2 * (64 / 2 + 2) + clusters * 4);
  const BuiltSegment plain = test::Build(*backend, rows, rows, 0, {.sketch = false});
  EXPECT_TRUE(plain.head.sketch.empty());
  EXPECT_EQ(plain.head.index_bytes(), unsketched);
  EXPECT_EQ(built.head.end_position(), 1000);
}

}  // namespace
}  // namespace wavekv
