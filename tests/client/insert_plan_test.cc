// How an insert is cut, without a daemon.
#include "client/insert_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <random>

namespace wavekv::client {
namespace {

using testing::ElementsAre;

TEST(PlanInsertTest, CutsOnTokenBoundaries) {
  struct Row {
    const char* why;
    InsertExtent extent;
    size_t token_bytes;
    size_t bytes_max;
    std::vector<InsertPiece> pieces;
  };
  const Row rows[] = {
      {"fits in one", {2, 10}, 8, 160, {{0, 2, 0, 10}}},
      {"one byte too few for the last token", {2, 10}, 8, 159, {{0, 2, 0, 9}, {0, 2, 9, 1}}},
      {"one token a message", {3, 3}, 8, 24, {{0, 3, 0, 1}, {0, 3, 1, 1}, {0, 3, 2, 1}}},
      {"one token of all layers does not fit: groups of layers",
       {3, 2},
       8,
       23,
       {{0, 2, 0, 1}, {0, 2, 1, 1}, {2, 1, 0, 2}}},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    const auto pieces = PlanInsert(row.extent, row.token_bytes, row.bytes_max);
    ASSERT_TRUE(pieces.ok()) << pieces.status();
    EXPECT_EQ(*pieces, row.pieces);
  }
}

TEST(PlanInsertTest, EveryRowExactlyOnce) {
  const uint32_t seed = std::random_device()();
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const InsertExtent extent{.layers = static_cast<uint32_t>(1 + random() % 7),
                              .tokens = 1 + random() % 90};
    const size_t token_bytes = 1 + random() % 50;
    const size_t bytes_max = token_bytes + random() % 900;
    SCOPED_TRACE(testing::Message() << "seed " << seed << " round " << round);
    const auto pieces = PlanInsert(extent, token_bytes, bytes_max);
    ASSERT_TRUE(pieces.ok()) << pieces.status();
    std::vector<int> seen(extent.layers * extent.tokens, 0);
    for (const InsertPiece& piece : *pieces) {
      EXPECT_LE(piece.layer_count * piece.token_count * token_bytes, bytes_max);
      for (uint32_t layer = 0; layer < piece.layer_count; ++layer) {
        for (uint64_t token = 0; token < piece.token_count; ++token) {
          ++seen[(piece.first_layer + layer) * extent.tokens + piece.first_token + token];
        }
      }
    }
    EXPECT_THAT(seen, testing::Each(1));
  }
}

TEST(PlanInsertTest, ATokenThatFitsNowhereNamesTheFlag) {
  const auto pieces = PlanInsert({1, 1}, 101, 100);
  EXPECT_EQ(pieces.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(pieces.status().message(), testing::HasSubstr("--message_bytes_max"));
  EXPECT_THAT(pieces.status().message(), testing::HasSubstr("101"));
}

TEST(GatherPieceTest, TakesTheRowsOfBothLayouts) {
  // [layers 2, tokens 3, heads 2, dim 1]: element = 100 layer + 10 token + head.
  std::vector<float> nhd;
  std::vector<float> hnd;
  for (int layer = 0; layer < 2; ++layer) {
    for (int a = 0; a < 6; ++a)
      nhd.push_back(static_cast<float>(100 * layer + 10 * (a / 2) + a % 2));
    for (int a = 0; a < 6; ++a)
      hnd.push_back(static_cast<float>(100 * layer + 10 * (a % 3) + a / 3));
  }
  const InsertPiece piece{.first_layer = 0, .layer_count = 2, .first_token = 1, .token_count = 2};
  const auto gather = [&](const std::vector<float>& data, Layout layout) {
    const bool is_nhd = layout == Layout::kNHD;
    const Tensor tensor{
        .dtype = DType::kF32,
        .shape = is_nhd ? std::vector<int64_t>{2, 3, 2, 1} : std::vector<int64_t>{2, 2, 3, 1},
        .data = data.data(),
        .layout = layout};
    std::string bytes = "what was there before";
    GatherPiece(tensor, {2, 3}, piece, &bytes);
    std::vector<float> result(bytes.size() / sizeof(float));
    std::memcpy(result.data(), bytes.data(), bytes.size());
    return result;
  };
  EXPECT_THAT(gather(nhd, Layout::kNHD), ElementsAre(10, 11, 20, 21, 110, 111, 120, 121));
  EXPECT_THAT(gather(hnd, Layout::kHND), ElementsAre(10, 20, 11, 21, 110, 120, 111, 121));
}

}  // namespace
}  // namespace wavekv::client
