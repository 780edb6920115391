// Answers against a float64 oracle: exact, approximate, degenerate, and in batches.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <span>
#include <vector>

#include "daemon/engine/cut_plan.h"
#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

// Sums of a few thousand products in fp32 against float64 stay well below this.
constexpr double kExactTolerance = 1e-4;

class AttendTest : public EngineTest {
 protected:
  void ExpectExact(SequenceRef sequence, const TokenData& data, uint64_t token_count, bool exact,
                   std::optional<ZoneBudget> budget, uint64_t seed) {
    for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
      const std::vector<float> queries = RandomQueries(shape(), seed + layer);
      const AttendOutcome found = Attend(sequence, layer, queries, exact, budget);
      ASSERT_TRUE(found.status.ok()) << found.status;
      const OracleAnswer expected = ExactOracle(data, layer, token_count, queries);
      EXPECT_LT(RelativeError(shape(), found.out, expected.out), kExactTolerance);
      for (uint32_t head = 0; head < shape().query_head_count; ++head) {
        EXPECT_NEAR(found.lse[head], expected.lse[head],
                    kExactTolerance * (1 + std::abs(expected.lse[head])));
      }
    }
  }
};

constexpr ZoneBudget kAllClusters = {.kind = BudgetKind::kRatio, .value = 1.0};

TEST_F(AttendTest, ExactModeAndFullBudgetAreExact) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    spec_.shape.dtype = dtype;
    const TokenData data(shape(), 2300, seed);
    const SequenceRef sequence = Filled(data, 2300);
    ExpectExact(sequence, data, 2300, true, std::nullopt, seed);
    ExpectExact(sequence, data, 2300, false, kAllClusters, seed);
  }
}

TEST_F(AttendTest, HeadGeometries) {
  const uint64_t seed = FreshSeed();
  struct Geometry {
    uint32_t query_heads, kv_heads, key_dim, value_dim;
  };
  for (const Geometry& g : {Geometry{1, 1, 32, 32},       // the smallest
                            Geometry{8, 8, 64, 32},       // MHA
                            Geometry{9, 3, 64, 64},       // a group that is no power of two
                            Geometry{12, 1, 40, 256},     // MQA, odd dims
                            Geometry{32, 2, 256, 33}}) {  // a wide group, odd value dim
    spec_.shape.query_head_count = g.query_heads;
    spec_.shape.kv_head_count = g.kv_heads;
    spec_.shape.key_dim = g.key_dim;
    spec_.shape.value_dim = g.value_dim;
    spec_.shape.softmax_scale = 1.0f / std::sqrt(static_cast<float>(g.key_dim));
    const TokenData data(shape(), 1400, seed);
    const SequenceRef sequence = Filled(data, 1400);
    EXPECT_EQ(StatusOf(sequence).clustered_tokens, 1332u);
    ExpectExact(sequence, data, 1400, false, kAllClusters, seed);
  }
}

TEST_F(AttendTest, DefaultRatioReadsLittleAndErrsLittle) {
  spec_.index.budget.sketch_clusters = 0;
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 8192, seed);
  const SequenceRef sequence = Filled(data, 8192);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const AttendOutcome found = Attend(sequence, 0, queries);
  ASSERT_TRUE(found.status.ok()) << found.status;
  const OracleAnswer expected = ExactOracle(data, 0, 8192, queries);
  for (uint32_t head = 0; head < shape().query_head_count; ++head) {
    // Values are independent of their keys, so the output's error says nothing here; the mass does.
    // Logits scatter around their topic's with deviation t = scale * |q| * kKeyNoise. The mean of
    // exp(scatter) is exp(t^2 / 2), so an estimate from the mean key falls short by t^2 / 2; the
    // rest is chance.
    double norm = 0;
    for (uint32_t i = head * shape().key_dim; i < (head + 1) * shape().key_dim; ++i) {
      norm += std::pow(double{queries[i]}, 2);
    }
    const double t = shape().softmax_scale * std::sqrt(norm) * kKeyNoise;
    EXPECT_NEAR(found.lse[head], expected.lse[head], t * t / 2 + 0.03);
  }
  const StepCounters& counters = found.counters;
  EXPECT_EQ(counters.steady_tokens, 2u * (4 + 64));
  EXPECT_GT(counters.retrieved_clusters, 0u);
  EXPECT_GT(counters.retrieved_tokens, counters.retrieved_clusters);
  EXPECT_GT(counters.estimated_clusters, counters.retrieved_clusters);
  EXPECT_EQ(counters.kv_bytes_full, 8192 * shape().token_bytes());
  EXPECT_LT(counters.kv_bytes_read, counters.kv_bytes_full / 4);
  EXPECT_GT(counters.kv_bytes_read,
            (counters.steady_tokens + counters.retrieved_tokens) * shape().token_bytes() / 2)
      << "rows and index arrays";
  EXPECT_EQ(StatusOf(sequence).counters.kv_bytes_read, counters.kv_bytes_read);
  EXPECT_EQ(engine_->Stats().counters.kv_bytes_read, counters.kv_bytes_read);
}

// FAULTS 22: nothing steady, nothing retrieved, nothing estimated.
TEST_F(AttendTest, AttentionOverNothing) {
  const SequenceRef sequence = Create(spec_);
  const std::vector<float> queries = RandomQueries(shape(), FreshSeed());
  for (const bool exact : {false, true}) {
    const AttendOutcome found = Attend(sequence, 0, queries, exact);
    ASSERT_TRUE(found.status.ok()) << found.status;
    EXPECT_THAT(found.out, ::testing::Each(0.0f));
    EXPECT_THAT(found.lse, ::testing::Each(-INFINITY));
    EXPECT_EQ(found.out.size(), shape().query_head_count * shape().value_dim);
  }
  const QueryBuffers buffers(shape(), sequence, 0, queries);
  const auto estimate = engine_->Estimate(kTenant, buffers.query);
  ASSERT_TRUE(estimate.ok()) << estimate.status();
  EXPECT_THAT(estimate->out, ::testing::Each(0.0f));
  EXPECT_THAT(estimate->lse, ::testing::Each(-INFINITY));
  EXPECT_THAT(estimate->lse_lower, ::testing::Each(-INFINITY));
  EXPECT_THAT(estimate->lse_upper, ::testing::Each(-INFINITY));
}

// FAULTS 21.
TEST_F(AttendTest, DegenerateKeys) {
  const uint64_t seed = FreshSeed();
  struct Case {
    const char* what;
    uint64_t tokens;
    bool equal;
    float value;
  };
  for (const Case& c :
       {Case{"one token", 1, false, 0}, Case{"three tokens", 3, false, 0},
        Case{"the sink alone", 4, false, 0}, Case{"one more", 5, false, 0},
        Case{"not a multiple of 8", 1333, false, 0},
        Case{"4,096 identical keys", 4096, true, 0.75f}, Case{"all-zero keys", 4096, true, 0.0f}}) {
    TokenData data(shape(), c.tokens, seed);
    if (c.equal) {
      const std::vector<float> key(shape().key_dim, c.value);
      for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
        for (uint64_t position = 0; position < c.tokens; ++position) {
          for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
            data.SetKey(layer, position, head, key);
          }
        }
      }
    }
    SCOPED_TRACE(c.what);
    const SequenceRef sequence = Create(spec_);
    Insert(sequence, data, 0, c.tokens);
    Build(sequence);
    const auto index = engine_->DescribeIndex(kTenant, sequence, std::nullopt, std::nullopt);
    ASSERT_TRUE(index.ok()) << index.status();
    uint64_t clustered = 0;
    for (const SegmentStatus& segment : index->segments) {
      clustered += segment.token_count;
      EXPECT_GT(segment.cluster_count, 0u);
      EXPECT_LE(segment.size_max, kClusterTokensMax);
    }
    EXPECT_EQ(clustered + index->steady_tokens,
              c.tokens * shape().kv_head_count * shape().layer_count);
    ExpectExact(sequence, data, c.tokens, true, std::nullopt, seed);
    // Estimating equal keys is exact too.
    if (c.equal) ExpectExact(sequence, data, c.tokens, false, kAllClusters, seed);
    const AttendOutcome found = Attend(sequence, 0, RandomQueries(shape(), seed));
    ASSERT_TRUE(found.status.ok()) << found.status;
    for (const float x : found.out) EXPECT_TRUE(std::isfinite(x));
  }
}

// FAULTS 23: keys a thousand times larger, and logits of +-80.
TEST_F(AttendTest, LargeNumbersStayFinite) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const float factor : {1000.0f, 80.0f}) {
      spec_.shape.dtype = dtype;
      TokenData data(shape(), 1500, seed);
      std::vector<float> key(shape().key_dim);
      for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
        for (uint64_t position = 0; position < 1500; ++position) {
          for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
            ConvertToFloat(dtype, data.Key(layer, position, head), key.size(), key.data());
            for (float& x : key) x *= factor;
            data.SetKey(layer, position, head, key);
          }
        }
      }
      const SequenceRef sequence = Filled(data, 1500);
      const std::vector<float> queries = RandomQueries(shape(), seed);
      const OracleAnswer expected = ExactOracle(data, 0, 1500, queries);
      const AttendOutcome all = Attend(sequence, 0, queries, false, kAllClusters);
      ASSERT_TRUE(all.status.ok()) << all.status;
      // Logits of several thousand carry an absolute error of 1e-3 in fp32, which the softmax
      // turns into a relative one.
      EXPECT_LT(RelativeError(shape(), all.out, expected.out), 0.02);
      const AttendOutcome found = Attend(sequence, 0, queries);
      ASSERT_TRUE(found.status.ok()) << found.status;
      for (const float x : found.out) EXPECT_TRUE(std::isfinite(x));
      for (const float x : found.lse) EXPECT_TRUE(std::isfinite(x));
    }
  }
}

// The sum of two of them passes the largest float: an answer of infinities would be a wrong one.
TEST_F(AttendTest, ValuesTooLargeToBeWeighedAreAnError) {
  spec_.shape.dtype = DType::kF32;
  TokenData data(shape(), 2, FreshSeed());
  for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
    for (uint64_t position = 0; position < 2; ++position) {
      for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
        data.SetKey(layer, position, head, std::vector<float>(shape().key_dim, 0));
        data.SetValue(layer, position, head, std::vector<float>(shape().value_dim, 2e38f));
      }
    }
  }
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 2);
  const AttendOutcome found = Attend(sequence, 0, RandomQueries(shape(), FreshSeed()));
  EXPECT_EQ(found.status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(found.status.message().find("too large to be weighed"), std::string::npos);
}

TEST_F(AttendTest, BudgetsPerLayerAndDenseLayers) {
  const uint64_t seed = FreshSeed();
  spec_.shape.layer_count = 3;
  spec_.index.budget = {.kind = BudgetKind::kClusters, .value = 5};
  spec_.index.layer_budgets = {{1, {.kind = BudgetKind::kClusters, .value = 2}}};
  spec_.index.dense_layers = {2};
  const TokenData data(shape(), 1500, seed);
  const SequenceRef sequence = Filled(data, 1500);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  EXPECT_EQ(Attend(sequence, 0, queries).counters.retrieved_clusters, 2u * 5);
  EXPECT_EQ(Attend(sequence, 1, queries).counters.retrieved_clusters, 2u * 2);
  const AttendOutcome dense = Attend(sequence, 2, queries);
  EXPECT_EQ(dense.counters.retrieved_clusters, 0u);
  EXPECT_EQ(dense.counters.steady_tokens, 2u * 1500);
  EXPECT_LT(RelativeError(shape(), dense.out, ExactOracle(data, 2, 1500, queries).out),
            kExactTolerance);
  // The call's budget goes before the layer's.
  EXPECT_EQ(Attend(sequence, 1, queries, false, ZoneBudget{BudgetKind::kClusters, 7})
                .counters.retrieved_clusters,
            2u * 7);
}

TEST_F(AttendTest, SteadyOnlyIgnoresTheRestAndCountsIt) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1500, seed);
  const SequenceRef sequence = Filled(data, 1500);
  const ZoneBudget steady_only = {.kind = BudgetKind::kClusters, .value = 0, .estimate_ratio = 0};
  const AttendOutcome found = Attend(sequence, 0, RandomQueries(shape(), seed), false, steady_only);
  ASSERT_TRUE(found.status.ok()) << found.status;
  EXPECT_EQ(found.counters.retrieved_clusters + found.counters.estimated_clusters, 0u);
  EXPECT_GT(found.counters.ignored_clusters, 0u);
}

// A batch of sequences of different lengths, layers and faults: each item stands for itself.
TEST_F(AttendTest, BatchItemsAreIndependent) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1500, seed);
  const SequenceRef full = Filled(data, 1500);
  const SequenceRef brief = Create(spec_);
  Insert(brief, data, 0, 10);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  std::vector<float> poisoned = queries;
  poisoned[shape().key_dim + 3] = NAN;
  const QueryBuffers a(shape(), full, 1, queries);
  const QueryBuffers b(shape(), {SequenceId(99), Generation(0)}, 0, queries);
  const QueryBuffers c(shape(), brief, 0, queries);
  const QueryBuffers d(shape(), brief, 0, poisoned);
  std::vector<AttendStep> steps(4);
  steps[0].query = a.query;
  steps[1].query = b.query;
  steps[2].query = c.query;
  steps[3].query = d.query;
  const auto outcomes = engine_->Attend(kTenant, steps);
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  ASSERT_EQ(outcomes->size(), 4u);
  EXPECT_EQ((*outcomes)[0].out, Attend(full, 1, queries).out);
  EXPECT_EQ((*outcomes)[1].status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ((*outcomes)[2].out, Attend(brief, 0, queries).out);
  EXPECT_EQ((*outcomes)[3].status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string((*outcomes)[3].status.message()), ::testing::HasSubstr("query head 1"));

  EXPECT_EQ(engine_->Attend(kTenant, {}).status().code(), absl::StatusCode::kInvalidArgument);
  const std::vector<AttendStep> many(257, steps[0]);
  EXPECT_EQ(engine_->Attend(kTenant, many).status().code(), absl::StatusCode::kInvalidArgument);
}

// Places in one block of bytes, at no particular alignment, with bytes between that stay.
class BytesSink : public AnswerSink {
 public:
  static constexpr std::byte kUntouched{0xaa};

  Place PlaceOf(size_t step_idx, uint32_t query_heads, uint32_t value_dim) override {
    asked_.push_back(step_idx);
    if (step_idx == without_room) return {};
    const size_t lse_bytes = query_heads * sizeof(float), out_bytes = lse_bytes * value_dim;
    std::vector<std::byte>& bytes = places_[step_idx];
    bytes.assign(3 + out_bytes + 2 + lse_bytes + 1, kUntouched);
    return {&bytes[3], &bytes[3 + out_bytes + 2]};
  }
  const std::vector<size_t>& asked() const { return asked_; }
  void ExpectHolds(size_t step_idx, const AttendOutcome& expected) const {
    const std::vector<std::byte>& bytes = places_.at(step_idx);
    const auto out = std::as_bytes(std::span(expected.out));
    const auto lse = std::as_bytes(std::span(expected.lse));
    std::vector<std::byte> wanted(bytes.size(), kUntouched);
    std::copy(out.begin(), out.end(), wanted.begin() + 3);
    std::copy(lse.begin(), lse.end(), wanted.end() - 1 - static_cast<ptrdiff_t>(lse.size()));
    EXPECT_EQ(bytes, wanted);
  }

  size_t without_room = SIZE_MAX;

 private:
  std::vector<size_t> asked_;
  std::map<size_t, std::vector<std::byte>> places_;
};

// The same answers, bit for bit, where the sink wants them and nowhere else: of short and long
// steps, clustered or not, beside some that fail.
TEST_F(AttendTest, AnswersGoToTheSink) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 2300, seed);
  const SequenceRef full = Create(spec_), brief = Create(spec_), none = Create(spec_);
  Insert(full, data, 0, 2300);
  Build(full);
  Insert(brief, data, 0, 3);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const SequenceRef unknown = {SequenceId(99), Generation(0)};
  const QueryBuffers buffers[] = {{shape(), brief, 0, queries},
                                  {shape(), unknown, 0, queries},
                                  {shape(), full, 1, queries},
                                  {shape(), none, 0, queries},
                                  {shape(), brief, 1, queries}};
  std::vector<AttendStep> steps(std::size(buffers));
  for (size_t i = 0; i < steps.size(); ++i) steps[i].query = buffers[i].query;
  BytesSink sink;
  sink.without_room = 4;
  const auto outcomes = engine_->Attend(kTenant, steps, &sink);
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  EXPECT_THAT(sink.asked(), ::testing::ElementsAre(0, 2, 3, 4));
  for (size_t i = 0; i < steps.size(); ++i) {
    const AttendOutcome& outcome = (*outcomes)[i];
    EXPECT_TRUE(outcome.out.empty() && outcome.lse.empty());
    EXPECT_EQ(outcome.status.code(), i == 1 ? absl::StatusCode::kNotFound : absl::StatusCode::kOk);
  }
  sink.ExpectHolds(0, Attend(brief, 0, queries));
  sink.ExpectHolds(2, Attend(full, 1, queries));
  sink.ExpectHolds(3, Attend(none, 0, queries));
}

TEST_F(AttendTest, SameLayerTwiceInOneBatchRunsInOrder) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 20, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 10);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const QueryBuffers buffers(shape(), sequence, 0, queries);
  const std::vector<int64_t> key_shape = {shape().kv_head_count, shape().key_dim};
  const std::vector<int64_t> value_shape = {shape().kv_head_count, shape().value_dim};
  std::vector<std::unique_ptr<ChunkBuffers>> tokens;
  std::vector<AttendStep> steps(3);
  for (size_t i = 0; i < steps.size(); ++i) {
    tokens.push_back(
        std::make_unique<ChunkBuffers>(data, sequence, std::vector<uint32_t>{0}, 10 + i, 1));
    steps[i].query = buffers.query;
    steps[i].append_position = 10 + i;
    steps[i].append_keys = TensorView{shape().dtype, key_shape, Layout::kNHD, tokens[i]->keys};
    steps[i].append_values =
        TensorView{shape().dtype, value_shape, Layout::kNHD, tokens[i]->values};
  }
  const auto outcomes = engine_->Attend(kTenant, steps);
  ASSERT_TRUE(outcomes.ok()) << outcomes.status();
  for (size_t i = 0; i < steps.size(); ++i) {
    ASSERT_TRUE((*outcomes)[i].status.ok()) << (*outcomes)[i].status;
    EXPECT_EQ((*outcomes)[i].token_count, 11 + i);
    EXPECT_LT(RelativeError(shape(), (*outcomes)[i].out, ExactOracle(data, 0, 11 + i, queries).out),
              kExactTolerance);
  }
}

TEST_F(AttendTest, AppendIsIdempotentAtTheEndOnly) {
  const uint64_t seed = FreshSeed();
  TokenData data(shape(), 20, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 10);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const AttendOutcome first = Decode(sequence, data, 0, 10, queries);
  ASSERT_TRUE(first.status.ok()) << first.status;
  EXPECT_EQ(first.token_count, 11u);
  const AttendOutcome retry = Decode(sequence, data, 0, 10, queries);
  ASSERT_TRUE(retry.status.ok()) << retry.status;
  EXPECT_EQ(retry.token_count, 11u);
  EXPECT_EQ(retry.out, first.out);
  EXPECT_EQ(Decode(sequence, data, 0, 9, queries).status.code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Decode(sequence, data, 0, 12, queries).status.code(),
            absl::StatusCode::kFailedPrecondition);
  data.Value(0, 10, 1)[0] ^= std::byte{1};
  EXPECT_EQ(Decode(sequence, data, 0, 10, queries).status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(StatusOf(sequence).token_count, 10u) << "layer 1 has no eleventh token";
}

TEST_F(AttendTest, EstimateBoundsHoldTheTrueMass) {
  const uint64_t seed = FreshSeed();
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    spec_.shape.dtype = dtype;
    const TokenData data(shape(), 1300, seed);
    const SequenceRef sequence = Filled(data, 1300);
    const uint64_t zone_end = kSinkTokens + StatusOf(sequence).clustered_tokens;
    ASSERT_EQ(zone_end, 1024u) << "a rest shorter than a small segment stays exact";
    for (uint64_t draw = 0; draw < 5; ++draw) {
      const std::vector<float> queries = RandomQueries(shape(), seed + draw);
      const QueryBuffers buffers(shape(), sequence, 0, queries);
      LayerQuery query = buffers.query;
      query.budget = ZoneBudget{.kind = BudgetKind::kClusters, .value = 0};
      const auto estimate = engine_->Estimate(kTenant, query);
      ASSERT_TRUE(estimate.ok()) << estimate.status();
      // Nothing is retrieved: the zone is positions [4, zone_end). Its mass is the whole up to
      // there without the sink's.
      const OracleAnswer upto_end = ExactOracle(data, 0, zone_end, queries);
      const OracleAnswer sink = ExactOracle(data, 0, kSinkTokens, queries);
      for (uint32_t head = 0; head < shape().query_head_count; ++head) {
        const double zone =
            upto_end.lse[head] + std::log1p(-std::exp(sink.lse[head] - upto_end.lse[head]));
        EXPECT_LE(estimate->lse_lower[head], zone + 1e-4);
        EXPECT_GE(estimate->lse_upper[head], zone - 1e-4);
        EXPECT_LE(estimate->lse_lower[head], estimate->lse[head]);
        EXPECT_GE(estimate->lse_upper[head], estimate->lse[head]);
      }
    }
  }
}

}  // namespace
}  // namespace wavekv::testing
