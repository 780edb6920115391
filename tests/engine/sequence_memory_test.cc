#include "daemon/engine/sequence_memory.h"

#include <cstring>
#include <vector>

#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"
#include "tests/storage/resident_bytes.h"

namespace wavekv::testing {
namespace {

class SequenceMemoryTest : public ::testing::Test {
 protected:
  std::unique_ptr<SequenceMemory> Create(uint64_t pool_bytes) {
    pool_ = BlockPool::Create({.bytes_max = pool_bytes});
    auto memory = SequenceMemory::Create(pool_, kTenant, spec_, 1, "test");
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }

  SequenceSpec spec_ = SmallSpec(3000);
  std::shared_ptr<BlockPool> pool_;
};

TEST_F(SequenceMemoryTest, Plan) {
  const MemoryPlan plan = PlanMemory(spec_, 1);
  EXPECT_EQ(plan.frame_tokens, 1024u);
  // Two layers of three stretches; a frame beside for each; one for the builder.
  EXPECT_EQ(plan.frame_count, 2u * 3 + 2 + 1);
  EXPECT_GE(plan.arena_bytes, plan.frame_count * 1024 * spec_.shape.token_bytes());
  EXPECT_GT(plan.reserved_bytes, plan.arena_bytes);

  SequenceSpec dense = spec_;
  dense.index.dense_layers = {0, 1};
  EXPECT_EQ(PlanMemory(dense, 4).frame_count, 2u * 3);
  EXPECT_EQ(PlanMemory(dense, 4).reserved_bytes, PlanMemory(dense, 4).arena_bytes) << "no index";

  SequenceSpec brief = spec_;
  brief.max_tokens = 200;  // Too short for any segment.
  EXPECT_EQ(PlanMemory(brief, 4).frame_tokens, 256u);
  EXPECT_EQ(PlanMemory(brief, 4).frame_count, 2u);

  // The largest that the validator lets through overflows nothing.
  SequenceSpec giant = spec_;
  giant.shape = {1024, 1024, 1024, 256, 256, DType::kF32, 1.0f, ""};
  giant.max_tokens = kTokensMax;
  giant.index.segment_tokens = 65536;
  giant.index.tokens_per_cluster = 1;
  const MemoryPlan huge = PlanMemory(giant, kEngineThreadsMax);
  const double rows = static_cast<double>(kTokensMax) * 1024 * 1024 * 512 * sizeof(float);
  EXPECT_NEAR(static_cast<double>(huge.arena_bytes), rows, 0.01 * rows);
  giant.max_tokens = kTokensMax / 1024;
  const MemoryPlan part = PlanMemory(giant, kEngineThreadsMax);
  EXPECT_EQ(huge.reserved_bytes - huge.arena_bytes,
            1024 * (part.reserved_bytes - part.arena_bytes));
}

TEST_F(SequenceMemoryTest, ChunksHaveTheirPlaceAndSegmentsTheirs) {
  const auto memory = Create(uint64_t{64} << 20);
  const auto first = memory->AllocateChunk(0, 0);
  const auto next = memory->AllocateChunk(0, 128);
  const auto other_layer = memory->AllocateChunk(1, 0);
  const auto other_stretch = memory->AllocateChunk(0, 1024);
  ASSERT_TRUE(first.ok() && next.ok() && other_layer.ok() && other_stretch.ok());
  EXPECT_EQ(next->base - first->base, static_cast<ptrdiff_t>(128 * spec_.shape.token_bytes()));
  const auto segment = memory->AllocateSegment(0, {4, 260});
  const auto beside = memory->AllocateSegment(0, {260, 516});
  ASSERT_TRUE(segment.ok() && beside.ok());
  EXPECT_EQ(beside->base - segment->base, static_cast<ptrdiff_t>(256 * spec_.shape.token_bytes()));
  const auto replacing = memory->AllocateSegment(0, {4, 1024});
  ASSERT_TRUE(replacing.ok());
  EXPECT_NE(replacing->base, segment->base) << "the small ones are still read";
  EXPECT_EQ(pool_->Usage().arena_count, 1u);
}

// A place is not given out again while somebody may read it.
TEST_F(SequenceMemoryTest, PlacesInUseAreLeftAlone) {
  const auto memory = Create(uint64_t{64} << 20);
  auto chunk = memory->AllocateChunk(0, 0);
  ASSERT_TRUE(chunk.ok());
  std::byte* const place = chunk->base;
  const std::shared_ptr<const void> reader = chunk->owner;
  auto copy = memory->AllocateChunk(0, 0);
  ASSERT_TRUE(copy.ok());
  EXPECT_NE(copy->base, place);
  auto third = memory->AllocateChunk(0, 0);
  ASSERT_TRUE(third.ok());
  EXPECT_NE(third->base, place);
  EXPECT_NE(third->base, copy->base);
}

TEST_F(SequenceMemoryTest, PlacesComeBack) {
  const auto memory = Create(uint64_t{64} << 20);
  std::byte* place = nullptr;
  const auto keeps_the_frame = memory->AllocateChunk(0, 128);
  ASSERT_TRUE(keeps_the_frame.ok());
  for (int round = 0; round < 3; ++round) {
    const auto chunk = memory->AllocateChunk(0, 0);
    ASSERT_TRUE(chunk.ok());
    if (round == 0) place = chunk->base;
    EXPECT_EQ(chunk->base, place);
  }
  EXPECT_EQ(pool_->Usage().arena_count, 1u);
}

// Rows that were clustered leave no pages behind, though their frame is still in use.
TEST_F(SequenceMemoryTest, PagesOfRowsGoBack) {
  const auto memory = Create(uint64_t{64} << 20);
  const size_t bytes = 128 * spec_.shape.token_bytes();
  const auto keeps_the_frame = memory->AllocateChunk(0, 128);
  auto chunk = memory->AllocateChunk(0, 0);
  ASSERT_TRUE(keeps_the_frame.ok() && chunk.ok());
  std::memset(keeps_the_frame->base, 1, bytes);
  std::memset(chunk->base, 2, bytes);
  const std::byte* const place = chunk->base;
  ASSERT_EQ(ResidentBytes(place, bytes), bytes);
  chunk->owner = nullptr;
  EXPECT_EQ(ResidentBytes(place, bytes), 0u);
  EXPECT_EQ(ResidentBytes(keeps_the_frame->base, bytes), bytes);
  EXPECT_EQ(keeps_the_frame->base[0], std::byte{1});
}

TEST_F(SequenceMemoryTest, OverflowStaysWithinThePool) {
  const MemoryPlan plan = PlanMemory(spec_, 1);
  const uint64_t frame_bytes = plan.frame_tokens * spec_.shape.token_bytes();
  const auto memory = Create(plan.reserved_bytes + 2 * frame_bytes);
  std::vector<RowMemory> held;
  // Each replaces the one before and keeps it: as many as there are frames, and two beyond.
  absl::Status last;
  while (last.ok()) {
    auto segment = memory->AllocateSegment(0, {4, 1024});
    last = segment.status();
    if (segment.ok()) held.push_back(*std::move(segment));
  }
  EXPECT_EQ(held.size(), plan.frame_count + 2);
  EXPECT_EQ(last.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(last.message()), ::testing::HasSubstr("overflow"));
  EXPECT_EQ(memory->reserved_bytes(), plan.reserved_bytes + 2 * frame_bytes);
  held.clear();
  EXPECT_EQ(pool_->Usage().reserved_bytes, plan.reserved_bytes) << "overflow arenas are gone";
  EXPECT_EQ(pool_->Usage().allocated_bytes, 0u);
}

TEST_F(SequenceMemoryTest, CloseLeavesWhatIsInUse) {
  const auto memory = Create(uint64_t{64} << 20);
  auto chunk = memory->AllocateChunk(0, 0);
  auto sink = memory->AllocateSink();
  ASSERT_TRUE(chunk.ok() && sink.ok());
  sink->owner = nullptr;
  memory->Close();
  EXPECT_GT(pool_->Usage().reserved_bytes, 0u);
  chunk->base[0] = std::byte{1};  // Still mapped.
  EXPECT_EQ(memory->AllocateChunk(0, 0).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(memory->AllocateSegment(0, {4, 260}).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(memory->AllocateSink().status().code(), absl::StatusCode::kNotFound);
  chunk->owner = nullptr;
  EXPECT_EQ(pool_->Usage().reserved_bytes, 0u);
  EXPECT_EQ(memory->reserved_bytes(), 0u);
}

}  // namespace
}  // namespace wavekv::testing
