// What operators and researchers see: descriptions, explanations, recall; true and bounded.
#include "daemon/engine/inspection.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <vector>

#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

class InspectionTest : public EngineTest {};

uint64_t Sum(const std::vector<uint64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

TEST_F(InspectionTest, DescribeIndex) {
  const uint64_t seed = FreshSeed();
  const SequenceRef sequence = Filled(TokenData(shape(), 3000, seed), 3000);
  const auto whole = engine_->DescribeIndex(kTenant, sequence, std::nullopt, std::nullopt);
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(whole->segments.size(), 3u * 2 * 2) << "segments, layers, heads";
  EXPECT_EQ(whole->token_count, 3000u);
  EXPECT_EQ(whole->steady_tokens, 4u * 68);
  EXPECT_EQ(whole->index_count, 4u) << "layers, heads";
  EXPECT_FALSE(whole->building);
  EXPECT_EQ(Sum(whole->sizes.counts), whole->cluster_count);
  EXPECT_EQ(Sum(whole->radii.counts), whole->cluster_count);
  EXPECT_EQ(whole->sizes.edges.size(), whole->sizes.counts.size() + 1);
  EXPECT_GE(whole->imbalance, 1.0);
  EXPECT_LT(whole->imbalance, 4.0);
  EXPECT_EQ(whole->index_bytes, StatusOf(sequence).index_bytes);
  EXPECT_EQ(whole->payload_bytes, StatusOf(sequence).payload_bytes);
  EXPECT_GE(whole->pool_bytes, whole->payload_bytes);
  uint64_t clusters = 0;
  for (const SegmentStatus& segment : whole->segments) {
    clusters += segment.cluster_count;
    EXPECT_LE(segment.radius_mean, segment.radius_max);
    EXPECT_LE(segment.singleton_count, segment.cluster_count);
  }
  EXPECT_EQ(clusters, whole->cluster_count);

  const auto part = engine_->DescribeIndex(kTenant, sequence, 1, 0);
  ASSERT_TRUE(part.ok()) << part.status();
  ASSERT_EQ(part->segments.size(), 3u);
  EXPECT_EQ(part->index_count, 1u);
  EXPECT_EQ(part->steady_tokens, 68u);
  EXPECT_EQ(part->segments[2].first_position, 2048u);
  EXPECT_EQ(part->segments[2].layer, 1u);
  EXPECT_EQ(part->segments[2].kv_head, 0u);
  EXPECT_EQ(part->payload_bytes, whole->payload_bytes / 4);
  EXPECT_EQ(engine_->DescribeIndex(kTenant, sequence, 2, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->DescribeIndex(kTenant, sequence, 0, 2).status().code(),
            absl::StatusCode::kInvalidArgument);

  const SequenceRef empty = Create(spec_);
  const auto nothing = engine_->DescribeIndex(kTenant, empty, std::nullopt, std::nullopt);
  ASSERT_TRUE(nothing.ok()) << nothing.status();
  EXPECT_EQ(nothing->cluster_count, 0u);
  EXPECT_EQ(Sum(nothing->sizes.counts), 0u);
  EXPECT_EQ(nothing->imbalance, 0.0);
}

// A version of segments of one token each.
LayerSnapshot ManySegments(const ModelShape& shape, uint64_t segment_count) {
  const auto gauge = std::make_shared<std::atomic<uint64_t>>(0);
  SegmentList segments;
  for (uint64_t i = 0; i < segment_count; ++i) {
    SegmentHead head;
    head.first_position = kSinkTokens + i;
    head.token_count = head.cluster_count = 1;
    head.key_dim = shape.key_dim;
    head.value_dim = shape.value_dim;
    head.sizes = {1};
    head.radii = {0};
    segments.push_back(std::make_shared<const Segment>(
        TokenRange{head.first_position, head.first_position + 1},
        std::vector<SegmentHead>(shape.kv_head_count, head), shape.token_bytes(), gauge));
  }
  LayerSnapshot snapshot;
  snapshot.shape = &shape;
  snapshot.token_count = kSinkTokens + segment_count;
  snapshot.chunks = std::make_shared<const ChunkList>();
  snapshot.version =
      std::make_shared<const LayerVersion>(1, std::move(segments), shape.kv_head_count);
  return snapshot;
}

TEST_F(InspectionTest, ManySegmentsAreLeftOffAndCounted) {
  const std::vector<std::pair<uint32_t, LayerSnapshot>> layers = {{0, ManySegments(shape(), 500)},
                                                                  {1, ManySegments(shape(), 100)}};
  const IndexDescription index = DescribeLayers(layers, std::nullopt);
  EXPECT_EQ(index.segments.size(), 1024u);
  EXPECT_EQ(index.segments_left_off, 2u * 600 - 1024);
  EXPECT_EQ(index.cluster_count, 2u * 600);
  EXPECT_EQ(index.imbalance, 1.0);
}

TEST_F(InspectionTest, ExplainSaysWhyAndHowMuch) {
  const uint64_t seed = FreshSeed();
  const SequenceRef sequence = Filled(TokenData(shape(), 3000, seed), 3000);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const QueryBuffers buffers(shape(), sequence, 0, queries);
  EXPECT_EQ(engine_->Explain(kTenant, LayerQuery{.sequence = sequence}, 0, 5).status().code(),
            absl::StatusCode::kFailedPrecondition)
      << "the layer has seen no query";
  LayerQuery query = buffers.query;
  query.budget = ZoneBudget{
      .kind = BudgetKind::kClusters, .value = 6, .estimate_ratio = 0.5, .sketch_clusters = 9};
  const auto all = engine_->Explain(kTenant, query, 1, 1000);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->clusters.size(), all->cluster_count);
  EXPECT_EQ(all->retrieval_count, 6u);
  EXPECT_EQ(all->budget, "clusters: 6; 50 % of the others estimated, the best 9 from their sketch");
  EXPECT_EQ(all->ranked_by, "expected error");
  double estimated = 0;
  double truth = 0;
  uint64_t zones[3] = {0, 0, 0};
  std::vector<bool> seen(3000, false);
  for (size_t i = 0; i < all->clusters.size(); ++i) {
    const ExplainedCluster& cluster = all->clusters[i];
    EXPECT_EQ(cluster.rank, i);
    EXPECT_GE(cluster.expected_error, 0.0);
    if (i > 0) {
      EXPECT_LE(cluster.expected_error, all->clusters[i - 1].expected_error);
    }
    EXPECT_EQ(cluster.zone == "retrieval", i < 6);
    EXPECT_EQ(cluster.zone == "sketch", i >= 6 && i < 15);
    zones[0] += cluster.zone == "retrieval" ? 1 : 0;
    zones[1] += cluster.zone == "estimation" || cluster.zone == "sketch" ? 1 : 0;
    zones[2] += cluster.zone == "ignored" ? 1 : 0;
    EXPECT_EQ(cluster.positions.size(), std::min<size_t>(cluster.size, kPositionsListedMax));
    for (const uint64_t position : cluster.positions) {
      ASSERT_LT(position, 3000u);
      EXPECT_FALSE(seen[position]);
      seen[position] = true;
    }
    estimated += cluster.estimated_mass;
    truth += cluster.true_mass;
  }
  EXPECT_NEAR(estimated, 1.0, 1e-3);
  EXPECT_NEAR(truth, 1.0, 1e-3);
  // A coverage budget goes by mass, and so does its explanation.
  LayerQuery of_coverage = query;
  of_coverage.budget = ZoneBudget{.kind = BudgetKind::kCoverage, .value = 0.5};
  const auto by_mass = engine_->Explain(kTenant, of_coverage, 1, 1000);
  ASSERT_TRUE(by_mass.ok()) << by_mass.status();
  for (size_t i = 1; i < by_mass->clusters.size(); ++i) {
    ASSERT_LE(by_mass->clusters[i].estimated_mass, by_mass->clusters[i - 1].estimated_mass);
  }
  EXPECT_EQ(zones[0], 6u);
  EXPECT_NEAR(static_cast<double>(zones[1]), static_cast<double>(zones[2]), 1.0);
  EXPECT_GT(all->steady_mass, 0.0);
  EXPECT_LT(all->steady_mass + all->retrieval_mass + all->estimation_mass, 1.0 + 1e-4);

  // The group's vectors alone say the same; the last seen serve when none are given.
  std::vector<float> group(queries.begin() + 2 * shape().key_dim, queries.end());
  const std::vector<int64_t> group_shape = {2, shape().key_dim};
  LayerQuery of_group = query;
  of_group.queries = {DType::kF32, group_shape, Layout::kNHD, std::as_bytes(std::span(group))};
  const auto grouped = engine_->Explain(kTenant, of_group, 1, 3);
  ASSERT_TRUE(grouped.ok()) << grouped.status();
  ASSERT_EQ(grouped->clusters.size(), 3u);
  EXPECT_EQ(grouped->clusters[0].true_mass, all->clusters[0].true_mass);
  ASSERT_TRUE(Attend(sequence, 0, queries).status.ok());
  LayerQuery last = {.sequence = sequence, .layer = 0, .budget = query.budget};
  const auto remembered = engine_->Explain(kTenant, last, 1, 0);
  ASSERT_TRUE(remembered.ok()) << remembered.status();
  EXPECT_EQ(remembered->clusters.size(), kClustersExplainedDefault);
  EXPECT_EQ(remembered->clusters[0].true_mass, all->clusters[0].true_mass);

  EXPECT_EQ(engine_->Explain(kTenant, query, 2, 3).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->Explain(kTenant, query, 0, 1001).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(InspectionTest, BudgetsInWords) {
  EXPECT_EQ(BudgetText({}),
            "ratio: 0.5 % of the clusters; 100 % of the others estimated, the best 112 from their "
            "sketch");
  EXPECT_EQ(BudgetText({.kind = BudgetKind::kCoverage, .value = 0.9}),
            "coverage: the fewest clusters that hold 90 % of the estimated mass, at most 1/8 of "
            "the clusters; 100 % of the others estimated, the best 112 from their sketch");
  EXPECT_EQ(BudgetText({.kind = BudgetKind::kError, .value = 0.05, .clusters_max = 40}),
            "error: until the bound is under 0.05, at most 40 clusters; 100 % of the others "
            "estimated");
}

TEST_F(InspectionTest, SampleRecall) {
  const uint64_t seed = FreshSeed();
  const uint64_t tokens = 3000;
  const TokenData data(shape(), tokens, seed);
  const SequenceRef sequence = Filled(TokenData(shape(), tokens, seed), tokens);
  const auto unseen = engine_->SampleRecall(kTenant, sequence, {}, TensorView(), std::nullopt);
  ASSERT_TRUE(unseen.ok()) << unseen.status();
  ASSERT_EQ(unseen->layers.size(), 2u);
  EXPECT_FALSE(unseen->layers[0].sampled);

  const std::vector<float> queries = RandomQueries(shape(), seed);
  const AttendOutcome found = Attend(sequence, 1, queries);
  ASSERT_TRUE(found.status.ok()) << found.status;
  const auto seen = engine_->SampleRecall(kTenant, sequence, {}, TensorView(), std::nullopt);
  ASSERT_TRUE(seen.ok()) << seen.status();
  EXPECT_FALSE(seen->layers[0].sampled);
  const LayerRecall& recall = seen->layers[1];
  EXPECT_TRUE(recall.sampled);
  EXPECT_EQ(recall.layer, 1u);
  const OracleAnswer expected = ExactOracle(data, 1, tokens, queries);
  EXPECT_NEAR(recall.rel_error_max, RelativeError(shape(), found.out, expected.out), 1e-3);
  EXPECT_LE(recall.rel_error_mean, recall.rel_error_max);
  EXPECT_GT(recall.mass_covered_min, 0.0);
  EXPECT_LE(recall.mass_covered_min, recall.mass_covered_mean);
  EXPECT_LE(recall.mass_covered_mean, 1.0);
  EXPECT_NEAR(recall.kv_bytes_read_ratio,
              static_cast<double>(found.counters.kv_bytes_read) /
                  static_cast<double>(found.counters.kv_bytes_full),
              1e-9);

  // Given queries, given layers, and a budget that takes all.
  std::vector<float> both = queries;
  both.insert(both.end(), queries.begin(), queries.end());
  const std::vector<int64_t> both_shape = {2, shape().query_head_count, shape().key_dim};
  const TensorView view = {DType::kF32, both_shape, Layout::kNHD, std::as_bytes(std::span(both))};
  const std::vector<uint32_t> layers = {1, 0};
  const auto all = engine_->SampleRecall(kTenant, sequence, layers, view,
                                         ZoneBudget{.kind = BudgetKind::kRatio, .value = 1.0});
  ASSERT_TRUE(all.ok()) << all.status();
  ASSERT_EQ(all->layers.size(), 2u);
  EXPECT_EQ(all->layers[0].layer, 1u);
  for (const LayerRecall& layer : all->layers) {
    EXPECT_NEAR(layer.mass_covered_min, 1.0, 1e-4);
    EXPECT_LT(layer.rel_error_max, 1e-4);
  }
  const std::vector<uint32_t> one = {0};
  EXPECT_EQ(engine_->SampleRecall(kTenant, sequence, one, view, std::nullopt).status().code(),
            absl::StatusCode::kInvalidArgument)
      << "two layers of queries for one layer";
  const std::vector<uint32_t> missing = {5};
  EXPECT_EQ(
      engine_->SampleRecall(kTenant, sequence, missing, TensorView(), std::nullopt).status().code(),
      absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace wavekv::testing
