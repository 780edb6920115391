// The client's own attention against a float64 oracle, and its bounds checks.
#include "client/attend_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace wavekv::client {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

ModelShape Shape(DType dtype, uint32_t query_heads, uint32_t kv_heads, uint32_t key_dim,
                 uint32_t value_dim) {
  return {.layer_count = 1,
          .query_head_count = query_heads,
          .kv_head_count = kv_heads,
          .key_dim = key_dim,
          .value_dim = value_dim,
          .dtype = dtype,
          .softmax_scale = 1.0f / std::sqrt(static_cast<float>(key_dim)),
          .model_id = "test"};
}

struct Rows {
  std::vector<std::byte> keys;
  std::vector<std::byte> values;
  uint32_t count = 0;

  RowSpan span() const { return {keys.data(), values.data(), count}; }
};

std::vector<float> RandomFloats(size_t count, float scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> floats(count);
  for (float& value : floats) value = normal(random);
  return floats;
}

Rows RandomRows(const ModelShape& shape, uint32_t count, float scale, std::mt19937& random) {
  Rows rows{.keys = std::vector<std::byte>(count * shape.key_bytes()),
            .values = std::vector<std::byte>(count * shape.value_bytes()),
            .count = count};
  ConvertFromFloat(shape.dtype, RandomFloats(count * shape.key_dim, scale, random).data(),
                   count * shape.key_dim, rows.keys.data());
  ConvertFromFloat(shape.dtype, RandomFloats(count * shape.value_dim, 1, random).data(),
                   count * shape.value_dim, rows.values.data());
  return rows;
}

// Softmax attention of one query over the rows, in float64, as written in a textbook.
void Oracle(const ModelShape& shape, const float* query, std::span<const Rows> runs,
            std::vector<double>* out, double* lse) {
  std::vector<double> logits;
  std::vector<std::vector<float>> values;
  for (const Rows& run : runs) {
    for (uint32_t i = 0; i < run.count; ++i) {
      std::vector<float> key(shape.key_dim);
      std::vector<float> value(shape.value_dim);
      ConvertToFloat(shape.dtype, run.keys.data() + i * shape.key_bytes(), key.size(), key.data());
      ConvertToFloat(shape.dtype, run.values.data() + i * shape.value_bytes(), value.size(),
                     value.data());
      double dot = 0;
      for (uint32_t d = 0; d < shape.key_dim; ++d) dot += double{query[d]} * double{key[d]};
      logits.push_back(double{shape.softmax_scale} * dot);
      values.push_back(value);
    }
  }
  out->assign(shape.value_dim, 0.0);
  *lse = -std::numeric_limits<double>::infinity();
  if (logits.empty()) return;
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp(logits[i] - top);
    sum += weight;
    for (uint32_t d = 0; d < shape.value_dim; ++d) (*out)[d] += weight * double{values[i][d]};
  }
  for (double& value : *out) value /= sum;
  *lse = top + std::log(sum);
}

TEST(AttendRowsTest, EqualsTheOracle) {
  struct Row {
    const char* why;
    ModelShape shape;
    std::vector<uint32_t> runs;
    float key_scale;
  };
  const Row rows[] = {
      {"one row", Shape(DType::kF32, 1, 1, 32, 32), {1}, 1},
      {"several runs, a group", Shape(DType::kBF16, 4, 1, 64, 128), {64, 8, 3, 1}, 1},
      {"runs without rows", Shape(DType::kF16, 2, 1, 32, 48), {0, 5, 0}, 1},
      {"nothing at all", Shape(DType::kF32, 3, 1, 32, 32), {}, 1},
      {"logits of +-80 and beyond", Shape(DType::kF32, 2, 1, 64, 32), {300}, 40},
  };
  const uint32_t seed = std::random_device()();
  std::mt19937 random(seed);
  for (const Row& row : rows) {
    SCOPED_TRACE(testing::Message() << row.why << ", seed " << seed);
    const size_t group = row.shape.group_size();
    std::vector<Rows> runs;
    std::vector<RowSpan> spans;
    for (const uint32_t count : row.runs) {
      runs.push_back(RandomRows(row.shape, count, row.key_scale, random));
    }
    for (const Rows& run : runs) spans.push_back(run.span());
    const std::vector<float> queries = RandomFloats(group * row.shape.key_dim, 1, random);
    std::vector<float> out(group * row.shape.value_dim, 9.0f);
    std::vector<float> lse(group, 9.0f);
    AttendRows(row.shape, queries.data(), spans, out.data(), lse.data());
    for (size_t head = 0; head < group; ++head) {
      std::vector<double> expected;
      double expected_lse = 0;
      Oracle(row.shape, queries.data() + head * row.shape.key_dim, runs, &expected, &expected_lse);
      if (std::isinf(expected_lse)) {
        EXPECT_EQ(lse[head], -kInf);
      } else {
        // float32 dots of up to 64 products of size up to ~100: a few ulps of 300.
        EXPECT_NEAR(lse[head], expected_lse, 2e-4);
      }
      for (uint32_t d = 0; d < row.shape.value_dim; ++d) {
        ASSERT_NEAR(out[head * row.shape.value_dim + d], expected[d], 1e-3);
      }
    }
  }
}

TEST(AttendRowsTest, MergingPartsEqualsTheWhole) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  const ModelShape shape = Shape(DType::kF32, 3, 1, 32, 40);
  const Rows parts[] = {RandomRows(shape, 17, 1, random), RandomRows(shape, 40, 1, random)};
  const RowSpan spans[] = {parts[0].span(), parts[1].span()};
  const std::vector<float> queries = RandomFloats(3 * 32, 1, random);
  std::vector<float> whole(3 * 40), whole_lse(3), out(3 * 40), lse(3), other(3 * 40), other_lse(3);
  AttendRows(shape, queries.data(), spans, whole.data(), whole_lse.data());
  AttendRows(shape, queries.data(), {spans, 1}, out.data(), lse.data());
  AttendRows(shape, queries.data(), {spans + 1, 1}, other.data(), other_lse.data());
  MergeAttention(3, 40, other.data(), other_lse.data(), out.data(), lse.data());
  for (size_t i = 0; i < out.size(); ++i) EXPECT_NEAR(out[i], whole[i], 1e-5);
  for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], whole_lse[i], 1e-5);
}

TEST(AttendRowsTest, TheEmptyAttentionIsTheIdentity) {
  std::vector<float> out = {1, 2, 3, 4};
  std::vector<float> lse = {0.5f, -2};
  const std::vector<float> empty(4, 0.0f);
  const std::vector<float> empty_lse(2, -kInf);
  MergeAttention(2, 2, empty.data(), empty_lse.data(), out.data(), lse.data());
  EXPECT_THAT(out, testing::ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(lse, testing::ElementsAre(0.5f, -2));

  std::vector<float> nothing(4, 0.0f);
  std::vector<float> nothing_lse(2, -kInf);
  MergeAttention(2, 2, out.data(), lse.data(), nothing.data(), nothing_lse.data());
  EXPECT_EQ(nothing, out);
  EXPECT_EQ(nothing_lse, lse);

  MergeAttention(2, 2, empty.data(), empty_lse.data(), nothing.data(), nothing_lse.data());
  std::vector<float> both(4, 0.0f);
  std::vector<float> both_lse(2, -kInf);
  MergeAttention(2, 2, empty.data(), empty_lse.data(), both.data(), both_lse.data());
  EXPECT_EQ(both, empty) << "two empty attentions, not NaN";
  EXPECT_EQ(both_lse, empty_lse);
}

TEST(ResolveRowsTest, EveryOffsetIsCheckedAgainstTheRegion) {
  // 32 * 2 bytes a key, 64 * 2 a value.
  const ModelShape shape = Shape(DType::kBF16, 1, 1, 32, 64);
  const std::vector<std::byte> buffer(4096);
  const StagedRegion region{.offset = 1024, .bytes = 2048};
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  struct Row {
    const char* why;
    StagedRows rows;
    bool fits;
  };
  const Row rows[] = {
      {"at the start", {1024, 1088, 1}, true},
      {"up to the last byte", {1024, 3072 - 128, 1}, true},
      {"no rows at the end", {3072, 3072, 0}, true},
      {"values one row too far", {1024, 3072 - 128, 2}, false},
      {"keys before the region", {1022, 1088, 1}, false},
      {"values in the next region", {1024, 3072, 1}, false},
      {"behind the buffer", {1024, 4096, 1}, false},
      {"odd offset of a 16-bit element", {1025, 1088, 1}, false},
      {"offset that wraps around", {kMax - 1, 1088, 1}, false},
      {"row count that fills 2^32", {1024, 1088, 0xffffffffu}, false},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    const auto resolved = ResolveRows(buffer, region, shape, {&row.rows, 1});
    if (row.fits) {
      ASSERT_TRUE(resolved.ok()) << resolved.status();
      EXPECT_EQ((*resolved)[0].keys, buffer.data() + row.rows.key_offset);
      EXPECT_EQ((*resolved)[0].count, row.rows.row_count);
    } else {
      EXPECT_EQ(resolved.status().code(), absl::StatusCode::kInternal) << resolved.status();
    }
  }
}

}  // namespace
}  // namespace wavekv::client
