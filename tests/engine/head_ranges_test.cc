// FAULTS 19: the ranks of a tensor-parallel engine keep a part of a model's KV heads each. Whoever
// holds a head gives the answer that the whole model gives for it; heads that are not a sequence's
// are refused.
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kTokens = 2500;

class HeadRangesTest : public EngineTest {
 protected:
  HeadRangesTest() {
    spec_.shape.query_head_count = 8;
    spec_.shape.kv_head_count = 4;
  }

  // The spec of KV heads [first, first + count) of spec_'s model.
  SequenceSpec Part(uint32_t first, uint32_t count) const {
    SequenceSpec part = spec_;
    part.first_kv_head = first;
    part.total_kv_head_count = spec_.shape.kv_head_count;
    part.shape.kv_head_count = count;
    part.shape.query_head_count = count * spec_.shape.group_size();
    return part;
  }
  // Its rows of `whole`.
  TokenData Slice(const TokenData& whole, const SequenceSpec& part) const {
    TokenData slice(part.shape, whole.token_count(), 0);
    for (uint32_t layer = 0; layer < part.shape.layer_count; ++layer) {
      for (uint64_t position = 0; position < whole.token_count(); ++position) {
        for (uint32_t head = 0; head < part.shape.kv_head_count; ++head) {
          const uint32_t from = part.first_kv_head + head;
          std::memcpy(slice.Key(layer, position, head), whole.Key(layer, position, from),
                      part.shape.key_bytes());
          std::memcpy(slice.Value(layer, position, head), whole.Value(layer, position, from),
                      part.shape.value_bytes());
        }
      }
    }
    return slice;
  }
  absl::StatusOr<AttendOutcome> Answer(const ModelShape& shape, SequenceRef sequence,
                                       std::vector<float> queries) {
    const QueryBuffers buffers(shape, sequence, 1, std::move(queries));
    const AttendStep step{.query = buffers.query};
    auto outcomes = engine_->Attend(kTenant, {&step, 1});
    if (!outcomes.ok()) return outcomes.status();
    if (!outcomes->front().status.ok()) return outcomes->front().status;
    return std::move(outcomes->front());
  }
};

// A part of `all`, of query heads [first, first + count), `width` elements each.
std::vector<float> Heads(const std::vector<float>& all, uint32_t first, uint32_t count,
                         uint32_t width) {
  const auto begin = all.begin() + static_cast<ptrdiff_t>(size_t{first} * width);
  return {begin, begin + static_cast<ptrdiff_t>(size_t{count} * width)};
}

TEST_F(HeadRangesTest, EveryRankAnswersForItsHeadsAsTheWholeModel) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), kTokens, seed);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const auto whole = Answer(shape(), Filled(data, kTokens), queries);
  ASSERT_TRUE(whole.ok()) << whole.status();
  const uint32_t group = shape().group_size();
  // As two ranks write, and as four read.
  for (const uint32_t count : {2u, 1u}) {
    for (uint32_t first = 0; first < 4; first += count) {
      SCOPED_TRACE(::testing::Message() << "KV heads from " << first << ", " << count);
      const SequenceSpec part = Part(first, count);
      const auto found = Answer(part.shape, Filled(part, Slice(data, part), kTokens),
                                Heads(queries, first * group, count * group, shape().key_dim));
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(found->out, Heads(whole->out, first * group, count * group, shape().value_dim));
      EXPECT_EQ(found->lse, Heads(whole->lse, first * group, count * group, 1));
      EXPECT_GT(found->counters.retrieved_clusters, 0u);
    }
  }
}

TEST_F(HeadRangesTest, OtherHeadsThanASequencesAreRefused) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), kTokens, seed);
  const SequenceSpec half = Part(2, 2), quarter = Part(3, 1);
  const SequenceRef sequence = Filled(half, Slice(data, half), kTokens);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const uint32_t group = shape().group_size();
  const auto before =
      Answer(half.shape, sequence, Heads(queries, 2 * group, 2 * group, shape().key_dim));
  ASSERT_TRUE(before.ok()) << before.status();
  for (const ModelShape& other : {quarter.shape, shape()}) {
    const auto refused =
        Answer(other, sequence, Heads(queries, 0, other.query_head_count, other.key_dim));
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("[4, 32]"));
  }
  for (const TokenData& rows : {data, Slice(data, quarter)}) {
    const auto refused = TryInsert(sequence, rows, 0, kTokens);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
  }
  const auto after =
      Answer(half.shape, sequence, Heads(queries, 2 * group, 2 * group, shape().key_dim));
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->out, before->out);
  EXPECT_EQ(after->token_count, kTokens);
}

}  // namespace
}  // namespace wavekv::testing
