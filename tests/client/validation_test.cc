// What the SDK refuses before it sends anything.
#include "client/validation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace wavekv::client {
namespace {

using testing::HasSubstr;

const ModelShape kShape{.layer_count = 2,
                        .query_head_count = 4,
                        .kv_head_count = 2,
                        .key_dim = 32,
                        .value_dim = 64,
                        .dtype = DType::kBF16,
                        .softmax_scale = 1,
                        .model_id = "test"};
const float kData[1] = {};

Tensor Make(std::vector<int64_t> shape, DType dtype = DType::kBF16, Layout layout = Layout::kNHD) {
  return {.dtype = dtype, .shape = std::move(shape), .data = kData, .layout = layout};
}

TEST(CheckInsertTest, AcceptsWhatFits) {
  struct Row {
    const char* why;
    std::vector<uint32_t> layers;
    Tensor keys;
    Tensor values;
    uint64_t tokens;
  };
  const Row rows[] = {
      {"two layers", {0, 1}, Make({2, 7, 2, 32}), Make({2, 7, 2, 64}), 7},
      {"one layer without its axis", {1}, Make({5, 2, 32}), Make({5, 2, 64}), 5},
      {"one layer, mixed", {1}, Make({1, 5, 2, 32}), Make({5, 2, 64}), 5},
      {"HND",
       {0},
       Make({2, 9, 32}, DType::kBF16, Layout::kHND),
       Make({2, 9, 64}, DType::kBF16, Layout::kHND),
       9},
      {"keys HND, values NHD",
       {0},
       Make({2, 9, 32}, DType::kBF16, Layout::kHND),
       Make({9, 2, 64}),
       9},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    const auto extent = CheckInsert(kShape, row.layers, row.keys, row.values);
    ASSERT_TRUE(extent.ok()) << extent.status();
    EXPECT_EQ(extent->tokens, row.tokens);
    EXPECT_EQ(extent->layers, row.layers.size());
  }
}

TEST(CheckInsertTest, NamesExpectedAndFound) {
  struct Row {
    const char* why;
    std::vector<uint32_t> layers;
    Tensor keys;
    Tensor values;
    const char* text;
  };
  const Row rows[] = {
      {"no layer", {}, Make({5, 2, 32}), Make({5, 2, 64}), "found none"},
      {"unknown layer", {2}, Make({5, 2, 32}), Make({5, 2, 64}), "expected 0 ... 1, found 2"},
      {"layer twice", {1, 1}, Make({2, 5, 2, 32}), Make({2, 5, 2, 64}), "named twice"},
      {"fewer layers than named",
       {0, 1},
       Make({1, 5, 2, 32}),
       Make({2, 5, 2, 64}),
       "[1, 5, 2, 32]"},
      {"HND labelled NHD", {0}, Make({2, 9, 32}), Make({9, 2, 64}), "kv_heads=2"},
      {"key dim", {0}, Make({9, 2, 64}), Make({9, 2, 64}), "key_dim=32"},
      {"value dim", {0}, Make({9, 2, 32}), Make({9, 2, 32}), "value_dim=64"},
      {"no tokens", {0}, Make({0, 2, 32}), Make({0, 2, 64}), "tokens>0"},
      {"negative tokens", {0}, Make({-1, 2, 32}), Make({9, 2, 64}), "[-1, 2, 32]"},
      {"a scalar", {0}, Make({}), Make({9, 2, 64}), "found []"},
      {"another count of tokens", {0}, Make({9, 2, 32}), Make({8, 2, 64}), "expected 9 tokens"},
      {"another dtype",
       {0},
       Make({9, 2, 32}, DType::kF16),
       Make({9, 2, 64}),
       "expected dtype bf16 as the sequence stores, found f16"},
      {"no data", {0}, {.dtype = DType::kBF16, .shape = {9, 2, 32}}, Make({9, 2, 64}), "null"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    const absl::Status status = CheckInsert(kShape, row.layers, row.keys, row.values).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(status.message(), HasSubstr(row.text));
  }
}

TEST(CheckQueriesTest, AnyDTypeButOneShape) {
  EXPECT_TRUE(CheckQueries(kShape, 1, Make({4, 32}, DType::kF32)).ok());
  const absl::Status heads = CheckQueries(kShape, 1, Make({2, 32}));
  EXPECT_EQ(heads.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(heads.message(), HasSubstr("expected shape [query_heads=4, key_dim=32]"));
  EXPECT_THAT(heads.message(), HasSubstr("found [2, 32]"));
  EXPECT_FALSE(CheckQueries(kShape, 2, Make({4, 32})).ok()) << "there are layers 0 and 1";
}

TEST(CheckAppendTest, BothOrNone) {
  EXPECT_TRUE(CheckAppend(kShape, std::nullopt, std::nullopt).ok());
  EXPECT_TRUE(CheckAppend(kShape, Make({2, 32}), Make({2, 64})).ok());
  EXPECT_THAT(CheckAppend(kShape, Make({2, 32}), std::nullopt).message(),
              HasSubstr("found only append_keys"));
  EXPECT_FALSE(CheckAppend(kShape, Make({2, 32}), Make({2, 32})).ok());
  EXPECT_FALSE(CheckAppend(kShape, Make({2, 32}, DType::kF32), Make({2, 64})).ok());
}

TEST(CheckBudgetTest, Ranges) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Budget& budget : {Budget{}, Budget::Ratio(0), Budget::Ratio(1), Budget::Clusters(0),
                               Budget::Coverage(0.9), Budget::Error(3), Budget::SteadyOnly()}) {
    EXPECT_TRUE(CheckBudget(budget).ok());
  }
  for (const Budget& budget :
       {Budget::Ratio(1.01), Budget::Ratio(-0.1), Budget::Ratio(nan), Budget::Coverage(2),
        Budget::Error(-1), Budget::Error(nan), Budget{Budget::Kind::kClusters, 1.5},
        Budget{Budget::Kind::kClusters, -1}, Budget{Budget::Kind::kClusters, 4294967296.0},
        Budget{Budget::Kind::kRatio, 0.1, 0, 1.5}, Budget{Budget::Kind::kRatio, 0.1, 0, nan}}) {
    EXPECT_EQ(CheckBudget(budget).code(), absl::StatusCode::kInvalidArgument)
        << static_cast<int>(budget.kind) << " " << budget.value;
  }
}

TEST(TensorTest, BytesOfOddShapes) {
  EXPECT_EQ(Make({2, 3}).bytes(), 12u);
  EXPECT_EQ(Make({}).bytes(), 2u);
  EXPECT_EQ(Make({2, 0}).bytes(), 0u);
  EXPECT_EQ(Make({2, -3}).bytes(), 0u);
  EXPECT_EQ(Make({int64_t{1} << 62, 8}).bytes(), std::numeric_limits<size_t>::max());
}

}  // namespace
}  // namespace wavekv::client
