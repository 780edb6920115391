// Memory and life: reservations, limits, eviction, owners, pins and times to live.
#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "daemon/engine/sequence_memory.h"
#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

class LimitsTest : public EngineTest {
 protected:
  uint64_t BytesOf(const SequenceSpec& spec) const { return PlanMemory(spec, 2).reserved_bytes; }
  bool Exists(SequenceRef sequence) { return engine_->GetSequence(kTenant, sequence).ok(); }
  absl::Status TryCreate(ClientId owner = kOwner) {
    return engine_->CreateSequence(kTenant, owner, spec_).status();
  }
};

TEST_F(LimitsTest, PoolBytesPerPayloadByteOfSegments) {
  const TokenData data(shape(), 8192, FreshSeed());
  for (const uint64_t tokens : {400u, 1500u, 8192u}) {
    const SequenceRef sequence = Create(spec_);
    Insert(sequence, data, 0, tokens);
    Build(sequence);
    const auto index = engine_->DescribeIndex(kTenant, sequence, std::nullopt, std::nullopt);
    ASSERT_TRUE(index.ok()) << index.status();
    // Both counts take in the steady zone: sink and chunks of 128 tokens.
    uint64_t segment_payload = 0;
    for (const SegmentStatus& segment : index->segments) segment_payload += segment.payload_bytes;
    ASSERT_GT(segment_payload, 0u);
    const uint64_t chunk_tokens = (tokens + 127) / 128 * 128 - (tokens - 64) / 128 * 128;
    const uint64_t steady = (chunk_tokens + 4) * shape().token_bytes() * shape().layer_count;
    EXPECT_LE(static_cast<double>(index->pool_bytes - steady),
              1.05 * static_cast<double>(segment_payload))
        << tokens;
  }
}

// What is reserved suffices to the last token, in prefill and in decode, whatever the order in
// which layers grow: no overflow, no refusal, nothing above the reservation.
TEST_F(LimitsTest, ReservationSuffices) {
  const uint64_t seed = FreshSeed();
  spec_.shape.layer_count = 5;
  for (const uint64_t max_tokens : {300u, 1024u, 1500u, 5000u}) {
    SCOPED_TRACE(max_tokens);
    spec_.max_tokens = max_tokens;
    const TokenData data(shape(), max_tokens, seed);
    const uint64_t reserved = BytesOf(spec_);
    StartEngine({.epoch = 3, .build_threads = 2, .compute_threads = 2}, reserved + 4096);
    {
      const SequenceRef prefill = Create(spec_);  // Layers in step, in chunks.
      for (uint64_t position = 0; position < max_tokens; position += 100) {
        Insert(prefill, data, position, std::min<uint64_t>(100, max_tokens - position));
      }
      Build(prefill);
      EXPECT_EQ(pool_->Usage().reserved_bytes, StatusOf(prefill).reserved_bytes);
      EXPECT_LE(StatusOf(prefill).index_bytes + pool_->Usage().allocated_bytes, reserved);
      ASSERT_TRUE(engine_->DropSequence(kTenant, prefill).ok());
    }
    {
      const SequenceRef apart = Create(spec_);  // Layer by layer.
      for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
        const ChunkBuffers buffers(data, apart, {layer}, 0, max_tokens);
        ASSERT_TRUE(engine_->Insert(kTenant, buffers.chunk).ok());
      }
      Build(apart);
      ASSERT_TRUE(engine_->DropSequence(kTenant, apart).ok());
    }
    const SequenceRef decode = Create(spec_);
    Insert(decode, data, 0, 200);
    Build(decode);
    for (uint64_t position = 200; position < max_tokens; ++position) {
      Insert(decode, data, position, 1);
    }
    WaitIdle(decode);
    Build(decode);
    EXPECT_EQ(pool_->Usage().arena_count, 1u) << "no overflow";
    EXPECT_EQ(StatusOf(decode).token_count, max_tokens);
    ASSERT_TRUE(engine_->DropSequence(kTenant, decode).ok());
    EXPECT_EQ(pool_->Usage().reserved_bytes, 0u);
  }
}

// A child that idles keeps its parent's rows; the parent grows on, through overflow arenas, within
// the pool's limit.
TEST_F(LimitsTest, ParentGrowsBesideAnIdleFork) {
  const uint64_t seed = FreshSeed();
  spec_.max_tokens = 4096;
  const TokenData data(shape(), 4096, seed);
  const SequenceRef parent = Create(spec_);
  Insert(parent, data, 0, 1000);
  std::vector<SequenceRef> children;
  for (uint64_t count = 1000; count < 4000; count += 500) {
    const auto child = engine_->ForkSequence(kTenant, kOwner, parent, 0, 0, "idle");
    ASSERT_TRUE(child.ok()) << child.status();
    children.push_back({child->id, child->generation});
    Insert(parent, data, count, 500);
  }
  Insert(parent, data, 4000, 96);
  Build(parent);
  for (size_t i = 0; i < children.size(); ++i) {
    EXPECT_EQ(StatusOf(children[i]).token_count, 1000 + 500 * i);
    const std::vector<float> queries = RandomQueries(shape(), seed + i);
    const AttendOutcome found = Attend(children[i], 1, queries, /*exact=*/true);
    ASSERT_TRUE(found.status.ok()) << found.status;
    EXPECT_LT(RelativeError(shape(), found.out, ExactOracle(data, 1, 1000 + 500 * i, queries).out),
              1e-4);
  }
  ASSERT_TRUE(engine_->DropSequence(kTenant, parent).ok());
  for (const SequenceRef child : children) {
    ASSERT_TRUE(engine_->DropSequence(kTenant, child).ok());
  }
  while (pool_->Usage().reserved_bytes > 0) std::this_thread::yield();  // Children may be building.
}

// FAULTS 25: fill to 100 %, pin all, and ask once more.
TEST_F(LimitsTest, FullAndAllPinned) {
  const uint64_t each = BytesOf(spec_);
  StartEngine({.epoch = 3, .build_threads = 2, .compute_threads = 2}, 3 * each + 100);
  const TokenData data(shape(), 8192, FreshSeed());
  std::vector<SequenceRef> sequences;
  for (int i = 0; i < 3; ++i) {
    sequences.push_back(Create(spec_));
    Insert(sequences.back(), data, 0, 8192);
    Build(sequences.back());
    ASSERT_TRUE(engine_->Pin(kTenant, sequences.back(), true).ok());
  }
  EXPECT_EQ(engine_->ReleaseOwner(kOwner), 0u) << "pinned sequences outlive their owner";
  const absl::Status full = TryCreate();
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.message()), ::testing::HasSubstr("largest holders"));
  EXPECT_EQ(TryInsert(sequences[0], data, 8191, 1).status(), absl::OkStatus()) << "a retry";
  const TokenData longer(shape(), 8200, 1);
  EXPECT_EQ(TryInsert(sequences[0], longer, 8192, 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  for (const SequenceRef sequence : sequences) EXPECT_TRUE(Exists(sequence));
  // One pin less, and there is room.
  ASSERT_TRUE(engine_->Pin(kTenant, sequences[1], false).ok());
  EXPECT_TRUE(TryCreate().ok());
  EXPECT_FALSE(Exists(sequences[1]));
}

TEST_F(LimitsTest, EvictsTheLeastRecentlyUsedOfNobodys) {
  const uint64_t each = BytesOf(spec_);
  StartEngine({.epoch = 3, .build_threads = 1, .compute_threads = 1}, 4 * each + 100);
  const SequenceRef held = Create(spec_, kTenant, ClientId(1));
  std::vector<SequenceRef> idle;
  for (int i = 0; i < 3; ++i) {
    clock_.AdvanceMs(10);
    idle.push_back(Create(spec_, kTenant, ClientId(2)));
    ASSERT_TRUE(engine_->SetTtl(kTenant, idle.back(), 1'000'000).ok());
  }
  clock_.AdvanceMs(10);
  EXPECT_EQ(Attend(idle[0], 0, RandomQueries(shape(), 1)).status, absl::OkStatus());
  EXPECT_EQ(TryCreate().code(), absl::StatusCode::kResourceExhausted) << "all have their owner";
  EXPECT_EQ(engine_->ReleaseOwner(ClientId(2)), 0u) << "they have a time to live";
  EXPECT_TRUE(TryCreate().ok());
  EXPECT_TRUE(Exists(held));
  EXPECT_TRUE(Exists(idle[0])) << "used last";
  EXPECT_FALSE(Exists(idle[1]));
  EXPECT_TRUE(Exists(idle[2]));
  // More than there will ever be evicts nobody.
  SequenceSpec giant = spec_;
  giant.max_tokens = 1u << 20;
  EXPECT_EQ(engine_->CreateSequence(kTenant, kOwner, giant).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Exists(idle[0]) && Exists(idle[2]));
}

TEST_F(LimitsTest, AnotherTenantsSequencesAreNotEvicted) {
  const uint64_t each = BytesOf(spec_);
  StartEngine({.epoch = 3, .build_threads = 1, .compute_threads = 1}, each + 100);
  const SequenceRef theirs = Create(spec_, "uid:2000", ClientId(2));
  ASSERT_TRUE(engine_->SetTtl("uid:2000", theirs, 1'000'000).ok());
  engine_->ReleaseOwner(ClientId(2));
  EXPECT_EQ(TryCreate().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(engine_->GetSequence("uid:2000", theirs).ok());
}

TEST_F(LimitsTest, SequencesPerTenant) {
  StartEngine({.epoch = 3, .build_threads = 1, .compute_threads = 1, .sequences_max = 2},
              uint64_t{256} << 20);
  const SequenceRef first = Create(spec_);
  Create(spec_);
  const absl::Status refused = TryCreate();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), ::testing::HasSubstr("--sequences_max"));
  EXPECT_EQ(engine_->ForkSequence(kTenant, kOwner, first, 0, 0, "").status().code(),
            absl::StatusCode::kResourceExhausted);
  Create(spec_, "uid:2000", ClientId(1));  // Others are counted on their own.
  ASSERT_TRUE(engine_->DropSequence(kTenant, first).ok());
  EXPECT_TRUE(TryCreate().ok());
  EXPECT_THAT(engine_->Stats().sequences,
              ::testing::ElementsAre(std::pair<TenantId, uint32_t>(kTenant, 2),
                                     std::pair<TenantId, uint32_t>("uid:2000", 1)));
}

TEST_F(LimitsTest, OwnersPinsAndTimesToLive) {
  const SequenceRef plain = Create(spec_, kTenant, ClientId(1));
  const SequenceRef pinned = Create(spec_, kTenant, ClientId(1));
  const SequenceRef timed = Create(spec_, kTenant, ClientId(1));
  const SequenceRef others = Create(spec_, kTenant, ClientId(2));
  ASSERT_TRUE(engine_->Pin(kTenant, pinned, true).ok());
  ASSERT_TRUE(engine_->SetTtl(kTenant, pinned, 100).ok());
  ASSERT_TRUE(engine_->SetTtl(kTenant, timed, 100).ok());
  EXPECT_EQ(engine_->ReleaseOwner(ClientId(1)), 1u);
  EXPECT_FALSE(Exists(plain));
  EXPECT_TRUE(Exists(others));
  EXPECT_EQ(StatusOf(timed).owner, ClientId(0));
  EXPECT_EQ(engine_->ReleaseOwner(ClientId(0)), 0u) << "nobody holds no lease";
  EXPECT_TRUE(Exists(timed));

  clock_.AdvanceMs(99);
  engine_->Reap();
  EXPECT_TRUE(Exists(timed));
  EXPECT_EQ(StatusOf(timed).idle_ms, 99u) << "looking at it is no use of it";
  EXPECT_EQ(Attend(timed, 0, RandomQueries(shape(), 1)).status, absl::OkStatus());
  clock_.AdvanceMs(99);
  engine_->Reap();
  EXPECT_TRUE(Exists(timed)) << "the time counts from the last use";
  clock_.AdvanceMs(1);
  engine_->Reap();
  EXPECT_FALSE(Exists(timed));
  EXPECT_TRUE(Exists(pinned)) << "pinned never expires";
  EXPECT_TRUE(Exists(others)) << "no time to live, and its owner is there";
}

// FAULTS 31: preempted in the middle, dropped, admitted again; and aborted during the prefill.
TEST_F(LimitsTest, PreemptAndReadmit) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  std::string first_print;
  for (int round = 0; round < 3; ++round) {
    const SequenceRef sequence = Create(spec_);
    Insert(sequence, data, 0, 2000);
    if (round > 0) Build(sequence);
    for (uint64_t position = 2000; position < 2017; ++position) Insert(sequence, data, position, 1);
    Build(sequence);
    const std::string print = Fingerprint(sequence, seed);
    if (round == 0) first_print = print;
    EXPECT_TRUE(print == first_print) << "round " << round;
    Insert(sequence, data, 2017, 900);  // Builds run when it is dropped.
    ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  }
  while (pool_->Usage().reserved_bytes > 0) std::this_thread::yield();
  EXPECT_EQ(engine_->Stats().index_bytes, 0u);
}

TEST_F(LimitsTest, StatsAddUp) {
  const TokenData data(shape(), 2000, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 2000);
  Build(sequence);
  const EngineStats stats = engine_->Stats();
  const SequenceStatus status = StatusOf(sequence);
  EXPECT_EQ(stats.index_bytes, status.index_bytes);
  EXPECT_GT(stats.index_bytes, 0u);
  EXPECT_EQ(stats.pool.reserved_bytes, status.reserved_bytes);
  EXPECT_EQ(status.payload_bytes, 2000 * shape().token_bytes() * shape().layer_count);
  EXPECT_EQ(stats.build_queue, 0u);
  EXPECT_EQ(stats.backend.name, "cpu");
  EXPECT_TRUE(stats.wave_buffers.empty());
  EXPECT_TRUE(engine_->WaveBuffers(kTenant, 1000).empty());
}

}  // namespace
}  // namespace wavekv::testing
