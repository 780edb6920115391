// Query: the plan, the staged and the inline rows, and what merges to the answer of Attend.
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/fake_stager.h"

namespace wavekv::testing {
namespace {

class QueryTest : public EngineTest {
 protected:
  QueryTest() {
    StartEngine({.epoch = 3, .build_threads = 2, .compute_threads = 2}, uint64_t{256} << 20,
                CreateFakeStager(buffer_));
    spec_.attach_wave_buffer = true;
  }

  absl::StatusOr<QueryOutcome> Query(SequenceRef sequence, const std::vector<float>& queries,
                                     std::optional<ZoneBudget> budget, bool inline_rows,
                                     uint64_t completed_step = 0) {
    const QueryBuffers buffers(shape(), sequence, 0, queries);
    LayerQuery query = buffers.query;
    query.budget = budget;
    return engine_->Query(kTenant, query,
                          {.inline_rows = inline_rows, .completed_step = completed_step});
  }

  // The client's part: exact attention over rows, merged with the estimation zone.
  std::vector<float> Merge(const QueryOutcome& outcome, const std::vector<float>& queries,
                           const std::function<std::vector<RowRun>(const HeadZones&)>& rows) {
    const std::unique_ptr<ComputeBackend> backend = CreateCpuBackend();
    std::vector<float> out;
    const uint32_t group = shape().group_size();
    for (const HeadZones& zones : outcome.heads) {
      GroupQuery query;
      query.queries = std::span(queries).subspan(zones.kv_head * group * shape().key_dim,
                                                 group * shape().key_dim);
      query.group_size = group;
      query.key_dim = shape().key_dim;
      query.value_dim = shape().value_dim;
      query.payload_dtype = shape().dtype;
      query.scale = shape().softmax_scale;
      PartialAttention answer;
      EXPECT_TRUE(backend->AttendRows(rows(zones), query, &answer).ok());
      PartialAttention estimated;
      const auto first_out = outcome.estimation.out.begin() +
                             static_cast<ptrdiff_t>(zones.kv_head * group * shape().value_dim);
      estimated.out.assign(first_out, first_out + group * shape().value_dim);
      const auto first_lse =
          outcome.estimation.lse.begin() + static_cast<ptrdiff_t>(zones.kv_head * group);
      estimated.lse.assign(first_lse, first_lse + group);
      MergePartial(estimated, &answer);
      out.insert(out.end(), answer.out.begin(), answer.out.end());
    }
    return out;
  }

  void ExpectNear(const std::vector<float>& found, const std::vector<float>& expected) {
    EXPECT_LT(RelativeError(shape(), found, std::vector<double>(expected.begin(), expected.end())),
              1e-5);
  }

  const std::shared_ptr<FakeBuffer> buffer_ = std::make_shared<FakeBuffer>();
};

TEST_F(QueryTest, StagedRowsAndEstimationMakeTheAnswer) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  const SequenceRef sequence = Filled(data, data.token_count());
  ASSERT_EQ(buffer_->regions().size(), 1u);
  EXPECT_EQ(buffer_->regions().at(sequence.id).max_tokens, spec_.max_tokens);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  for (const ZoneBudget& budget :
       {ZoneBudget(), ZoneBudget{.kind = BudgetKind::kClusters, .value = 9},
        ZoneBudget{.kind = BudgetKind::kCoverage, .value = 0.8},
        ZoneBudget{.kind = BudgetKind::kError, .value = 0.3}}) {
    const auto outcome = Query(sequence, queries, budget, false, 7);
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    EXPECT_EQ(buffer_->last_completed_step(), 7u);
    EXPECT_GT(outcome->step, 0u);
    const std::vector<std::byte> bytes = buffer_->bytes();
    const std::vector<float> merged = Merge(*outcome, queries, [&](const HeadZones& zones) {
      std::vector<RowRun> rows;
      for (const StagedRows& staged : zones.staged) {
        rows.push_back({bytes.data() + staged.key_offset, bytes.data() + staged.value_offset,
                        staged.row_count});
      }
      EXPECT_TRUE(zones.inline_keys.empty());
      return rows;
    });
    const AttendOutcome attended = Attend(sequence, 0, queries, false, budget);
    ASSERT_TRUE(attended.status.ok()) << attended.status;
    ExpectNear(merged, attended.out);
    EXPECT_EQ(outcome->counters.retrieved_clusters, attended.counters.retrieved_clusters);
    EXPECT_EQ(outcome->counters.kv_bytes_read, attended.counters.kv_bytes_read);
    for (uint32_t head = 0; head < shape().query_head_count; ++head) {
      EXPECT_LE(outcome->estimation.lse_lower[head], outcome->estimation.lse[head]);
      EXPECT_GE(outcome->estimation.lse_upper[head], outcome->estimation.lse[head]);
    }
  }
}

TEST_F(QueryTest, InlineRowsMakeTheSameAnswer) {
  const uint64_t seed = FreshSeed();
  spec_.attach_wave_buffer = false;
  const TokenData data(shape(), 3000, seed);
  const SequenceRef sequence = Filled(data, data.token_count());
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const auto outcome = Query(sequence, queries, std::nullopt, true);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  EXPECT_EQ(outcome->step, 0u);
  const std::vector<float> merged = Merge(*outcome, queries, [&](const HeadZones& zones) {
    EXPECT_TRUE(zones.staged.empty());
    uint64_t retrieved = 0;
    for (const RetrievedCluster& cluster : zones.retrieved) retrieved += cluster.size;
    EXPECT_EQ(zones.inline_positions.size(), zones.steady_tokens + retrieved);
    EXPECT_EQ(zones.inline_keys.size(), zones.inline_positions.size() * shape().key_bytes());
    // Steady rows come first, in order of position.
    for (uint64_t i = 1; i < zones.steady_tokens; ++i) {
      EXPECT_LT(zones.inline_positions[i - 1], zones.inline_positions[i]);
    }
    return std::vector<RowRun>{{zones.inline_keys.data(), zones.inline_values.data(),
                                static_cast<uint32_t>(zones.inline_positions.size())}};
  });
  ExpectNear(merged, Attend(sequence, 0, queries).out);
  // Neither a wave buffer nor inline rows: the plan and the estimation alone.
  const auto plan = Query(sequence, queries, std::nullopt, false);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->heads[1].retrieved.size(), outcome->heads[1].retrieved.size());
  EXPECT_TRUE(plan->heads[1].staged.empty() && plan->heads[1].inline_keys.empty());
  // Best clusters first: by mass, for the budget that goes by mass.
  const auto by_mass =
      Query(sequence, queries, ZoneBudget{.kind = BudgetKind::kCoverage, .value = 0.5}, false);
  ASSERT_TRUE(by_mass.ok()) << by_mass.status();
  for (const HeadZones& zones : by_mass->heads) {
    for (size_t i = 1; i < zones.retrieved.size(); ++i) {
      ASSERT_GE(zones.retrieved[i - 1].estimated_mass, zones.retrieved[i].estimated_mass);
    }
  }
}

// FAULTS 17: what does not fit is estimated and counted, never dropped.
TEST_F(QueryTest, WhatDoesNotFitMovesToEstimation) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  const SequenceRef sequence = Filled(data, data.token_count());
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const ZoneBudget ten = {.kind = BudgetKind::kClusters, .value = 10};
  const auto whole = Query(sequence, queries, ten, false);
  ASSERT_TRUE(whole.ok()) << whole.status();
  buffer_->SetRunsMax(3);
  const auto tight = Query(sequence, queries, ten, false);
  ASSERT_TRUE(tight.ok()) << tight.status();
  EXPECT_EQ(tight->counters.retrieved_clusters, 2u * 3);
  EXPECT_EQ(tight->counters.moved_to_estimation, 2u * 7);
  EXPECT_EQ(tight->counters.estimated_clusters, whole->counters.estimated_clusters + 2 * 7);
  for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
    ASSERT_EQ(tight->heads[head].retrieved.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(tight->heads[head].retrieved[i].cluster_idx,
                whole->heads[head].retrieved[i].cluster_idx)
          << "the best stay";
    }
  }
  // The merged answer is that of a budget of three: what was moved is sketched like the next best.
  const std::vector<std::byte> bytes = buffer_->bytes();
  const std::vector<float> merged = Merge(*tight, queries, [&](const HeadZones& zones) {
    std::vector<RowRun> rows;
    for (const StagedRows& staged : zones.staged) {
      rows.push_back(
          {bytes.data() + staged.key_offset, bytes.data() + staged.value_offset, staged.row_count});
    }
    return rows;
  });
  const ZoneBudget three = {
      .kind = BudgetKind::kClusters, .value = 3, .sketch_clusters = ten.sketch_clusters + 7};
  ExpectNear(merged, Attend(sequence, 0, queries, false, three).out);
}

// FAULTS 17, the skew: one cluster would hold 80 % of a segment. It is split.
TEST_F(QueryTest, SkewedKeysAreSplit) {
  const uint64_t seed = FreshSeed();
  TokenData data(shape(), 1400, seed);
  const std::vector<float> same(shape().key_dim, 0.5f);
  for (uint64_t position = 100; position < 920; ++position) data.SetKey(0, position, 0, same);
  const SequenceRef sequence = Filled(data, data.token_count());
  const auto index = engine_->DescribeIndex(kTenant, sequence, 0, 0);
  ASSERT_TRUE(index.ok()) << index.status();
  for (const SegmentStatus& segment : index->segments) {
    EXPECT_LE(segment.size_max, kClusterTokensMax);
  }
  const auto one = Query(sequence, RandomQueries(shape(), seed),
                         ZoneBudget{.kind = BudgetKind::kClusters, .value = 1}, false);
  ASSERT_TRUE(one.ok()) << one.status();
  EXPECT_EQ(one->counters.retrieved_clusters, 2u);
  EXPECT_EQ(one->heads[0].retrieved.size(), 1u);
}

TEST_F(QueryTest, AbsentWaveBuffer) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1500, seed);
  const SequenceRef sequence = Filled(data, data.token_count());
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const AttendOutcome before = Attend(sequence, 0, queries);
  buffer_->SetStatus(absl::UnavailableError("wavebufferd is away"));
  EXPECT_EQ(Query(sequence, queries, std::nullopt, false).status().code(),
            absl::StatusCode::kUnavailable);
  const auto inlined = Query(sequence, queries, std::nullopt, true);
  ASSERT_TRUE(inlined.ok()) << inlined.status();
  EXPECT_TRUE(inlined->heads[0].staged.empty());
  EXPECT_FALSE(inlined->heads[0].inline_keys.empty());
  // An answer needs no wave buffer.
  const AttendOutcome after = Attend(sequence, 0, queries);
  ASSERT_TRUE(after.status.ok()) << after.status;
  EXPECT_EQ(after.out, before.out);
  EXPECT_TRUE(engine_->WaveBuffers(kTenant, 1000).empty());
  EXPECT_EQ(engine_->CreateSequence(kTenant, kOwner, spec_).status().code(),
            absl::StatusCode::kUnavailable);
  // Any other error is the caller's to know.
  buffer_->SetStatus(absl::ResourceExhaustedError("the steady rows do not fit"));
  EXPECT_EQ(Query(sequence, queries, std::nullopt, true).status().code(),
            absl::StatusCode::kResourceExhausted);
  buffer_->SetStatus(absl::OkStatus());
  ASSERT_EQ(engine_->WaveBuffers(kTenant, 1000).size(), 1u);
  EXPECT_EQ(engine_->WaveBuffers(kTenant, 1000)[0].ticket, "uid:1000/1000");
  EXPECT_EQ(engine_->Stats().wave_buffers.size(), 1u);
}

TEST_F(QueryTest, AttendCountsHitsAndMisses) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  const SequenceRef sequence = Filled(data, data.token_count());
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const AttendOutcome first = Attend(sequence, 0, queries);
  EXPECT_EQ(first.counters.cache_hit_blocks, 0u);
  EXPECT_GT(first.counters.cache_miss_blocks, 0u);
  const AttendOutcome second = Attend(sequence, 0, queries);
  EXPECT_EQ(second.counters.cache_miss_blocks, 0u);
  EXPECT_EQ(second.counters.cache_hit_blocks, first.counters.cache_miss_blocks);
  const auto queried = Query(sequence, queries, std::nullopt, false);
  ASSERT_TRUE(queried.ok()) << queried.status();
  EXPECT_EQ(queried->counters.cache_hit_blocks, first.counters.cache_miss_blocks);
  const uint64_t touches = buffer_->touches();
  Attend(sequence, 0, queries, /*exact=*/true);
  EXPECT_EQ(buffer_->touches(), touches) << "the baseline leaves the cache alone";
  // A layer's blocks are its own.
  EXPECT_EQ(Attend(sequence, 1, queries).counters.cache_hit_blocks, 0u);
}

TEST_F(QueryTest, RegionsComeAndGoWithTheirSequences) {
  const TokenData data(shape(), 100, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 100);
  const auto child = engine_->ForkSequence(kTenant, kOwner, sequence, 0, 200, "");
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_TRUE(child->wave_buffer);
  EXPECT_EQ(buffer_->regions().size(), 2u);
  EXPECT_EQ(buffer_->regions().at(child->id).max_tokens, 200u);
  ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  EXPECT_EQ(buffer_->regions().count(sequence.id), 0u);
  EXPECT_EQ(engine_->ReleaseOwner(kOwner), 1u);
  EXPECT_TRUE(buffer_->regions().empty());
}

}  // namespace
}  // namespace wavekv::testing
