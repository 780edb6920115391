// Forks share and diverge; truncation gives back what a fresh sequence would hold.
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

class ForkTruncateTest : public EngineTest {
 protected:
  SequenceRef Fork(SequenceRef parent, uint64_t token_count = 0, uint64_t max_tokens = 0) {
    const auto child =
        engine_->ForkSequence(kTenant, kOwner, parent, token_count, max_tokens, "child");
    EXPECT_TRUE(child.ok()) << child.status();
    return child.ok() ? SequenceRef{child->id, child->generation} : SequenceRef();
  }
  SequenceRef Truncate(SequenceRef sequence, uint64_t token_count) {
    const auto status = engine_->TruncateSequence(kTenant, sequence, token_count);
    EXPECT_TRUE(status.ok()) << status.status();
    EXPECT_EQ(status->token_count, token_count);
    EXPECT_EQ(status->generation.value(), sequence.generation.value() + 1);
    return {sequence.id, status->generation};
  }
};

TEST_F(ForkTruncateTest, ForkEqualsItsParentAndDiverges) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 4000, seed);
  TokenData other(shape(), 4000, seed + 1);
  for (const uint64_t tokens : {3u, 100u, 1300u, 2600u}) {
    SCOPED_TRACE(tokens);
    const SequenceRef parent = Filled(data, tokens);
    const std::string print = Fingerprint(parent, seed);
    const SequenceRef child = Fork(parent);
    EXPECT_NE(child.id, parent.id);
    EXPECT_TRUE(Fingerprint(child, seed) == print);
    // The child goes its own way, through small segments and a stretch; the parent sees nothing.
    Insert(child, other, tokens, 1300);
    Build(child);
    EXPECT_TRUE(Fingerprint(parent, seed) == print);
    // And the other way round, with the parent gone in the end.
    const std::string child_print = Fingerprint(child, seed);
    Insert(parent, data, tokens, 1300);
    Build(parent);
    EXPECT_TRUE(Fingerprint(child, seed) == child_print);
    ASSERT_TRUE(engine_->DropSequence(kTenant, parent).ok());
    EXPECT_TRUE(Fingerprint(child, seed) == child_print);
    const SequenceRef fresh = Create(spec_);
    if (tokens > 0) Insert(fresh, data, 0, tokens);
    Insert(fresh, other, tokens, 1300);
    Build(fresh);
    EXPECT_TRUE(Fingerprint(fresh, seed) == child_print);
    ASSERT_TRUE(engine_->DropSequence(kTenant, child).ok());
    ASSERT_TRUE(engine_->DropSequence(kTenant, fresh).ok());
  }
  EXPECT_EQ(pool_->Usage().reserved_bytes, 0u);
  EXPECT_EQ(engine_->Stats().index_bytes, 0u);
}

TEST_F(ForkTruncateTest, ForkOfAPrefix) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 2600, seed);
  const SequenceRef parent = Filled(data, 2600);
  for (const uint64_t tokens : {1u, 4u, 130u, 1087u, 1088u, 1500u, 2048u}) {
    SCOPED_TRACE(tokens);
    const SequenceRef child = Fork(parent, tokens, tokens + 64);
    EXPECT_EQ(StatusOf(child).token_count, tokens);
    EXPECT_EQ(StatusOf(child).max_tokens, tokens + 64);
    Build(child);
    const SequenceRef fresh = Filled(data, tokens);
    EXPECT_TRUE(Fingerprint(child, seed) == Fingerprint(fresh, seed));
    ASSERT_TRUE(engine_->DropSequence(kTenant, child).ok());
    ASSERT_TRUE(engine_->DropSequence(kTenant, fresh).ok());
  }
  EXPECT_EQ(engine_->ForkSequence(kTenant, kOwner, parent, 2601, 0, "").status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->ForkSequence(kTenant, kOwner, parent, 0, 2599, "").status().code(),
            absl::StatusCode::kInvalidArgument);
}

// A child forked before its parent's builds were done plans them itself: cuts depend on counts and
// BuildIndex calls, not on how far a builder had come.
TEST_F(ForkTruncateTest, ForkDuringABuild) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 4096, seed);
  const SequenceRef parent = Create(spec_);
  Insert(parent, data, 0, 4096);
  const auto stopped =
      engine_->BuildIndex(kTenant, parent, [](const BuildProgress&) { return false; });
  EXPECT_EQ(stopped.status().code(), absl::StatusCode::kCancelled);
  const SequenceRef child = Fork(parent);
  WaitIdle(parent);
  WaitIdle(child);
  EXPECT_TRUE(Fingerprint(child, seed) == Fingerprint(parent, seed));
}

TEST_F(ForkTruncateTest, TruncatedEqualsFresh) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 2600, seed);
  const SequenceRef sequence_before = Filled(data, 2600);
  SequenceRef sequence = sequence_before;
  // Keeping all; inside the window; inside the rest, a stretch, a chunk, the sink; nothing.
  for (const uint64_t tokens : {2600u, 2590u, 2300u, 1900u, 1088u, 1087u, 700u, 128u, 3u, 0u}) {
    SCOPED_TRACE(tokens);
    sequence = Truncate(sequence, tokens);
    const SequenceRef fresh = Create(spec_);
    if (tokens > 0) Insert(fresh, data, 0, tokens);
    // Before any rebuild: exact answers over what is left.
    const std::vector<float> queries = RandomQueries(shape(), seed);
    const AttendOutcome cut = Attend(sequence, 1, queries, /*exact=*/true);
    ASSERT_TRUE(cut.status.ok()) << cut.status;
    if (tokens > 0) {
      EXPECT_LT(RelativeError(shape(), cut.out, ExactOracle(data, 1, tokens, queries).out), 1e-4);
    }
    Build(sequence);
    Build(fresh);
    EXPECT_TRUE(Fingerprint(sequence, seed) == Fingerprint(fresh, seed));
    ASSERT_TRUE(engine_->DropSequence(kTenant, fresh).ok());
  }
  // It can be filled again, with other tokens.
  const TokenData other(shape(), 1500, seed + 1);
  Insert(sequence, other, 0, 1500);
  Build(sequence);
  const SequenceRef fresh = Filled(other, 1500);
  EXPECT_TRUE(Fingerprint(sequence, seed) == Fingerprint(fresh, seed));
}

// A reader that began before a truncation keeps its tokens, even when others are written in their
// place: its fork shares the rows.
TEST_F(ForkTruncateTest, TruncationDisturbsNoReader) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1500, seed);
  const TokenData other(shape(), 1500, seed + 1);
  SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 200);
  const SequenceRef child = Fork(sequence);
  const std::string print = Fingerprint(child, seed);
  for (const uint64_t tokens : {190u, 130u, 100u, 2u}) {
    sequence = Truncate(sequence, tokens);
    Insert(sequence, other, tokens, 200 - tokens);
    EXPECT_TRUE(Fingerprint(child, seed) == print);
  }
}

TEST_F(ForkTruncateTest, SpeculationKeepsSegmentsAndMemory) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  const TokenData wrong(shape(), 3000, seed + 1);
  SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 500);
  Build(sequence);
  const uint64_t reserved = pool_->Usage().reserved_bytes;
  // Five speculated tokens a step, two of them right.
  uint64_t count = 500;
  while (count < 2600) {
    Insert(sequence, data, count, 2);
    Insert(sequence, wrong, count + 2, 3);
    count += 2;
    sequence = Truncate(sequence, count);
  }
  WaitIdle(sequence);
  EXPECT_EQ(StatusOf(sequence).clustered_tokens, 2048u + 256 - 4);
  EXPECT_EQ(pool_->Usage().reserved_bytes, reserved) << "within what was reserved";
  Build(sequence);
  const SequenceRef fresh = Filled(data, count);
  EXPECT_TRUE(Fingerprint(sequence, seed) == Fingerprint(fresh, seed));
}

// A layer may be a token ahead when a step is given up half way.
TEST_F(ForkTruncateTest, TruncateAfterAHalfDoneStep) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 300, seed);
  SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 200);
  const ChunkBuffers ahead(data, sequence, {0}, 200, 1);
  ASSERT_TRUE(engine_->Insert(kTenant, ahead.chunk).ok());
  EXPECT_EQ(engine_->TruncateSequence(kTenant, sequence, 201).status().code(),
            absl::StatusCode::kInvalidArgument);
  sequence = Truncate(sequence, 200);
  const TokenData other(shape(), 300, seed + 1);
  Insert(sequence, other, 200, 100);
  EXPECT_EQ(StatusOf(sequence).token_count, 300u);
}

TEST_F(ForkTruncateTest, BuildIndexOfATruncatedSequenceIsAborted) {
  const TokenData data(shape(), 8192, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 8192);
  bool truncated = false;
  const auto built = engine_->BuildIndex(kTenant, sequence, [&](const BuildProgress& progress) {
    if (!truncated && !progress.done) {
      EXPECT_TRUE(engine_->TruncateSequence(kTenant, sequence, 3000).ok());
      truncated = true;
    }
    return true;
  });
  ASSERT_TRUE(truncated);
  EXPECT_EQ(built.status().code(), absl::StatusCode::kAborted) << built.status();
}

}  // namespace
}  // namespace wavekv::testing
