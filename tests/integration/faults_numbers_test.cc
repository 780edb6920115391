// Faults of arithmetic and of the index (FAULTS rows 20 - 23), through the SDK on a real daemon.

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/integration/sdk_test.h"
#include "tests/mock_decoder/counter_random.h"

namespace wavekv::integration {
namespace {

class FaultsNumbersTest : public SdkTest {
 protected:
  void SetUp() override { Start({.wave_buffer = false}); }
};

struct PoisonRow {
  float poison;
  uint32_t layer;
  uint64_t position;
  uint32_t kv_head;
  uint64_t chunk_first;  // Tokens before it are stored already.
};

// Row 20: one NaN key poisoned centroid 0. One bad key among 4,096 is refused by position and head,
// and its chunk leaves nothing behind.
TEST_F(FaultsNumbersTest, OneBadKeyIsRefusedByName) {
  constexpr uint64_t kTokens = 4096;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const PoisonRow rows[] = {
      {nan, 0, 0, 0, 0},              // The very first, which k-means would have started from.
      {infinity, 1, 4095, 1, 0},      // The very last.
      {-infinity, 1, 2777, 0, 2048},  // In the second chunk of a prefill.
  };
  for (const PoisonRow& row : rows) {
    SCOPED_TRACE(row.position);
    HostCache clean = HostCache::Random(Shape(), kTokens, 20);
    HostCache poisoned = clean;
    poisoned.SetKey(row.layer, row.position, row.kv_head, 5, row.poison);
    auto sequence = Create(Shape(), kTokens);
    ASSERT_OK(sequence.status());
    if (row.chunk_first > 0) {
      const HostCache::Chunk head = clean.Slice(0, row.chunk_first, 0, 2);
      ASSERT_OK((*sequence)->Insert(0, head.layers, head.keys, head.values));
    }
    const uint64_t rest = kTokens - row.chunk_first;
    const HostCache::Chunk bad = poisoned.Slice(row.chunk_first, rest, 0, 2);
    const absl::Status refused =
        (*sequence)->Insert(row.chunk_first, bad.layers, bad.keys, bad.values);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    const std::string text(refused.message());
    EXPECT_NE(text.find(absl::StrCat("position ", row.position)), std::string::npos) << text;
    EXPECT_NE(text.find(absl::StrCat("head ", row.kv_head)), std::string::npos) << text;

    const HostCache::Chunk good = clean.Slice(row.chunk_first, rest, 0, 2);
    ASSERT_OK((*sequence)->Insert(row.chunk_first, good.layers, good.keys, good.values));
    ASSERT_OK((*sequence)->BuildIndex().status());
    const auto reference = CreateFilled(&clean);
    const std::vector<float> queries = RandomQueries(Shape(), 20);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const auto found = Attend(**sequence, layer, QueryTensor(Shape(), queries));
      const auto expected = Attend(*reference, layer, QueryTensor(Shape(), queries));
      ASSERT_OK(found.status());
      ASSERT_OK(expected.status());
      EXPECT_EQ(found->out, expected->out);
    }
  }
}

// Row 20, the query's side: refused, naming the query head; the step it came with appends nothing.
TEST_F(FaultsNumbersTest, BadQueryIsRefusedAndAppendsNothing) {
  HostCache cache = HostCache::Random(Shape(), 200, 21);
  const auto sequence = CreateFilled(&cache);
  std::vector<float> queries = RandomQueries(Shape(), 21);
  const auto before = Attend(*sequence, 0, QueryTensor(Shape(), queries));
  ASSERT_OK(before.status());
  std::vector<float> bad = queries;
  bad[2 * 64 + 7] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> row(2 * 64, 1.0f);
  client::AttendOptions append;
  append.append_keys = client::Tensor{DType::kF32, {2, 64}, row.data()};
  append.append_values = client::Tensor{DType::kF32, {2, 32}, row.data()};
  const auto refused = Attend(*sequence, 0, QueryTensor(Shape(), bad), append);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();
  EXPECT_NE(refused.status().message().find("head 2"), absl::string_view::npos) << refused.status();
  const auto after = Attend(*sequence, 0, QueryTensor(Shape(), queries));
  ASSERT_OK(after.status());
  EXPECT_EQ(after->out, before->out);
  EXPECT_EQ(after->token_count, 200u);
}

struct DegenerateRow {
  std::string what;
  uint64_t token_count;
  HostCache::Element key;
};

float Gauss(uint32_t layer, uint64_t position, uint32_t head, uint32_t d) {
  return mock::GaussFromWord(mock::StreamKey({22, layer, position, head, d}));
}
float Zero(uint32_t, uint64_t, uint32_t, uint32_t) { return 0.0f; }
float Same(uint32_t layer, uint64_t, uint32_t head, uint32_t d) { return Gauss(layer, 0, head, d); }
float TwoPoints(uint32_t layer, uint64_t position, uint32_t head, uint32_t d) {
  return Gauss(layer, position % 2, head, d);
}

// Row 21: fewer points than centroids, all points equal, odd sizes. The index is valid, its sizes
// sum up, and everything retrieved gives the exact answer.
TEST_F(FaultsNumbersTest, DegenerateKeysGiveAValidIndex) {
  const DegenerateRow rows[] = {
      {"one token", 1, Gauss},
      {"three tokens", 3, Gauss},
      {"identical keys", 4096, Same},
      {"all-zero keys", 4096, Zero},
      {"two different keys for 256 centroids", 4096, TwoPoints},
      {"a segment and one token, not a multiple of 8", 4 + 64 + 1025, Gauss},
  };
  for (const DegenerateRow& row : rows) {
    SCOPED_TRACE(row.what);
    HostCache cache(Shape(), row.token_count, row.key, Gauss);
    const auto sequence = CreateFilled(&cache);
    const std::vector<float> queries = RandomQueries(Shape(), 22);
    const HostCache::Exact exact = cache.Attend(0, queries, row.token_count);
    client::AttendOptions all;
    all.budget = client::Budget::Ratio(1.0);
    const auto everything = Attend(*sequence, 0, QueryTensor(Shape(), queries), all);
    const auto usual = Attend(*sequence, 0, QueryTensor(Shape(), queries));
    ASSERT_OK(everything.status());
    ASSERT_OK(usual.status());
    const client::StepCounters& counters = everything->counters;
    EXPECT_EQ(counters.steady_tokens + counters.retrieved_tokens, 2 * row.token_count);
    EXPECT_GE(counters.retrieved_tokens, counters.retrieved_clusters);  // None is empty.
    EXPECT_LE(counters.retrieved_tokens, 32 * counters.retrieved_clusters);
    EXPECT_LT(RelativeError(everything->out, exact.out), 1e-4);
    for (uint32_t head = 0; head < 4; ++head) {
      EXPECT_NEAR(everything->lse[head], exact.lse[head], 1e-3);
      EXPECT_TRUE(std::isfinite(usual->lse[head]));
    }
  }
}

// Row 22: nothing retrieved, nothing estimated, nothing steady: out = 0 and lse = -inf, no NaN.
TEST_F(FaultsNumbersTest, AttentionOverNothing) {
  auto sequence = Create(Shape(), 16);
  ASSERT_OK(sequence.status());
  const std::vector<float> queries = RandomQueries(Shape(), 23);
  const float minus_infinity = -std::numeric_limits<float>::infinity();
  const auto attention = Attend(**sequence, 0, QueryTensor(Shape(), queries));
  ASSERT_OK(attention.status());
  EXPECT_EQ(attention->out, std::vector<float>(4 * 32, 0.0f));
  EXPECT_EQ(attention->lse, std::vector<float>(4, minus_infinity));
  const auto estimation = (*sequence)->Estimate(0, QueryTensor(Shape(), queries));
  ASSERT_OK(estimation.status());
  EXPECT_EQ(estimation->out, std::vector<float>(4 * 32, 0.0f));
  EXPECT_EQ(estimation->lse, std::vector<float>(4, minus_infinity));
  EXPECT_EQ(estimation->lse_upper, std::vector<float>(4, minus_infinity));
  // The first token merges with nothing: its value is the answer, its logit the mass.
  HostCache one = HostCache::Random(Shape(), 1, 23);
  const HostCache::Chunk chunk = one.All();
  ASSERT_OK((*sequence)->Insert(0, chunk.layers, chunk.keys, chunk.values));
  const auto first = Attend(**sequence, 0, QueryTensor(Shape(), queries));
  ASSERT_OK(first.status());
  const HostCache::Exact exact = one.Attend(0, queries, 1);
  EXPECT_LT(RelativeError(first->out, exact.out), 1e-6);
  for (uint32_t head = 0; head < 4; ++head) EXPECT_NEAR(first->lse[head], exact.lse[head], 1e-5);
}

struct ScaleRow {
  std::string what;
  DType dtype;
  float key_scale;
  float query_scale;
};

// Row 23: overflow in 16 bits. Everything retrieved must come within rounding of float64; with the
// default budget everything stays finite.
TEST_F(FaultsNumbersTest, LargeKeysAndLogitsStayFinite) {
  constexpr uint64_t kTokens = 2048;
  const ScaleRow rows[] = {
      {"keys x 1000, bf16", DType::kBF16, 1000.0f, 0.01f},
      {"keys x 1000, f16: near its largest number", DType::kF16, 1000.0f, 0.01f},
      {"logits of +-80 and beyond", DType::kBF16, 8.0f, 4.0f},
      {"logits of +-80 and beyond, f16", DType::kF16, 8.0f, 4.0f},
      {"tiny keys: f16 subnormals", DType::kF16, 1e-6f, 1.0f},
  };
  for (const ScaleRow& row : rows) {
    SCOPED_TRACE(row.what);
    const auto key = [&row](uint32_t layer, uint64_t position, uint32_t head, uint32_t d) {
      return row.key_scale * Gauss(layer, position, head, d);
    };
    HostCache cache(Shape(row.dtype), kTokens, key, Gauss);
    const auto sequence = CreateFilled(&cache);
    const std::vector<float> queries = RandomQueries(cache.shape(), 24, row.query_scale);
    const HostCache::Exact exact = cache.Attend(1, queries, kTokens);
    client::AttendOptions all;
    all.budget = client::Budget::Ratio(1.0);
    const auto everything = Attend(*sequence, 1, QueryTensor(cache.shape(), queries), all);
    const auto usual = Attend(*sequence, 1, QueryTensor(cache.shape(), queries));
    ASSERT_OK(everything.status());
    ASSERT_OK(usual.status());
    EXPECT_LT(RelativeError(everything->out, exact.out), 1e-3);
    for (uint32_t head = 0; head < 4; ++head) {
      EXPECT_NEAR(everything->lse[head], exact.lse[head], 1e-5 * std::abs(exact.lse[head]) + 1e-3);
      EXPECT_TRUE(std::isfinite(usual->lse[head]));
    }
    EXPECT_TRUE(std::all_of(usual->out.begin(), usual->out.end(),
                            [](float x) { return std::isfinite(x); }));
  }
}

}  // namespace
}  // namespace wavekv::integration
