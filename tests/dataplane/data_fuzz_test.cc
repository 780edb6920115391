// Garbage through a live channel into a live engine, and rows that change under it: an answer or an
// error each time, and nothing that should not be there afterwards (FAULTS 7, 20, 32).
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "tests/dataplane/data_fixture.h"

namespace wavekv::testing {
namespace {

class DataFuzzTest : public DataPlaneTest {
 protected:
  DataFuzzTest() : seed_(FreshSeed()), random_(seed_), data_(shape(), 64, seed_) {}

  // The engine still answers another client, with the right numbers.
  void ExpectServing() {
    DataPeer peer = Connect(250);
    const SequenceRef sequence = Create(SmallSpec(64));
    const ChunkBuffers chunk(data_, sequence, {0, 1}, 0, 64);
    ASSERT_TRUE(peer.Insert(chunk.chunk).ok());
    const QueryBuffers query(shape(), sequence, 1, RandomQueries(shape(), seed_));
    shm::AttendItemRequest item;
    item.query = ToRequest(query.query);
    const DataAttention found = peer.Attend(item);
    ASSERT_TRUE(found.status.ok()) << found.status;
    EXPECT_LT(RelativeError(shape(), found.out, ExactOracle(data_, 1, 64, query.vectors).out),
              1e-3);
    ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  }

  const uint64_t seed_;
  std::mt19937_64 random_;
  TokenData data_;
};

TEST_F(DataFuzzTest, RandomRequestsOfEveryVerb) {
  DataPeer peer = Connect();
  for (int i = 0; i < 3000; ++i) {
    std::vector<std::byte> bytes(random_() % 2000);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_() % 3 == 0 ? random_() : 0);
    // An answer of some kind (an Attend's may be that each of its items is wrong).
    const auto reply = peer.Call(random_() % 6, bytes, random_() % 4096);
    ASSERT_NE(reply.status().code(), absl::StatusCode::kUnavailable);
  }
  ExpectServing();
}

// Good requests of a sequence that exists, with a few bytes changed: they get deep into the engine.
TEST_F(DataFuzzTest, DamagedRequestsOfARealSequence) {
  DataPeer peer = Connect();
  const SequenceRef sequence = Create(SmallSpec(4096));
  Insert(sequence, data_, 0, 64);
  const QueryBuffers query(shape(), sequence, 1, RandomQueries(shape(), seed_));
  shm::AttendItemRequest item;
  item.query = ToRequest(query.query);
  item.query.budget = shm::BudgetRef{.kind = shm::BudgetRefKind::kCoverage, .value = 0.5};
  const shm::AttendItemRequest items[] = {item, item};
  const shm::QueryRequest query_request{.query = item.query, .inline_rows = true};
  const ChunkBuffers chunk(data_, sequence, {0, 1}, 32, 32);
  const shm::InsertRequest insert{.sequence_id = sequence.id.value(),
                                  .generation = sequence.generation.value(),
                                  .first_position = 32,
                                  .layers = chunk.layers,
                                  .keys = ToRef(chunk.chunk.keys),
                                  .values = ToRef(chunk.chunk.values)};
  std::vector<std::vector<std::byte>> good(5);
  good[shm::kAttend].resize(shm::AttendBytes(items));
  shm::EncodeAttend(items, good[shm::kAttend]);
  good[shm::kQuery].resize(shm::QueryBytes(query_request));
  shm::EncodeQuery(query_request, good[shm::kQuery]);
  good[shm::kEstimate].resize(shm::EstimateBytes(item.query));
  shm::EncodeEstimate(item.query, good[shm::kEstimate]);
  good[shm::kInsert].resize(shm::PlaceInsert(insert).bytes);
  shm::EncodeInsert(insert, good[shm::kInsert]);
  for (int i = 0; i < 6000; ++i) {
    const uint64_t verb = 1 + random_() % 4;
    std::vector<std::byte> bytes = good[verb];
    const int changes = 1 + static_cast<int>(random_() % 4);
    for (int change = 0; change < changes; ++change) {
      bytes[random_() % std::min<size_t>(bytes.size(), 700)] = static_cast<std::byte>(random_());
    }
    if (random_() % 5 == 0) bytes.resize(random_() % bytes.size());
    // An answer of some kind; the channel itself stays.
    EXPECT_NE(peer.Call(verb, bytes, 64 << 10).status().code(), absl::StatusCode::kUnavailable);
  }
  ExpectServing();
}

// Two clients: one writes words of garbage all over its channel, rings included, with calls in
// between; the other must not notice.
TEST_F(DataFuzzTest, GarbageInOneChannelDisturbsNoOther) {
  for (int round = 0; round < 20; ++round) {
    DataPeer hostile = Connect(1);
    // The library's own mapping, written to behind its back.
    const shm::ChannelGeometry& geometry = hostile.channel().geometry();
    const shm::TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    shm::ClientChannel::Call call;
    ASSERT_EQ(hostile.channel().Begin(64, 64, deadline, &call), shm::CallState::kAnswered);
    std::byte* const base = call.request().data() - geometry.arena_offset;
    call = shm::ClientChannel::Call();
    for (int i = 0; i < 300; ++i) {
      const size_t at = random_() % (geometry.arena_offset + (64 << 10)) / 8 * 8;
      std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(base + at))
          .store(random_() % 2 == 0 ? random_() % 32 : random_(), std::memory_order_relaxed);
      if (i % 50 == 0) shm::FutexWake(reinterpret_cast<uint32_t*>(base + 128));
    }
    if (round % 5 == 0) ExpectServing();
  }
  ExpectServing();
  EXPECT_TRUE(BecomesIdle());
}

// A client whose requests and replies change while the daemon reads and writes them: it gets some
// answer or other, and what another tenant's client is told stays right.
TEST_F(DataFuzzTest, AnArenaThatChangesInMidCallDisturbsNoOther) {
  DataPeer hostile = Connect(1), other = Connect(2);
  const SequenceRef own = Create(SmallSpec(64)), others = Create(SmallSpec(64));
  Insert(own, data_, 0, 3);
  Insert(others, data_, 0, 60);
  const QueryBuffers own_query(shape(), own, 0, RandomQueries(shape(), seed_));
  const QueryBuffers others_query(shape(), others, 0, RandomQueries(shape(), seed_ + 1));
  shm::AttendItemRequest own_item, others_item;
  own_item.query = ToRequest(own_query.query);
  others_item.query = ToRequest(others_query.query);
  const AttendOutcome expected = Attend(others, 0, others_query.vectors);
  const uint64_t request_bytes = shm::AttendBytes({&own_item, 1});
  const uint64_t reply_bytes = shm::AttendReplyBytes(1, shape().query_head_count, 48);
  const shm::TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  for (int round = 0; round < 30; ++round) {
    shm::ClientChannel::Call call;
    ASSERT_EQ(hostile.channel().Begin(request_bytes, reply_bytes, deadline, &call),
              shm::CallState::kAnswered);
    shm::EncodeAttend({&own_item, 1}, call.request());
    // The tensor and the reply, or the request's head as well.
    const size_t first = round % 2 == 0 ? 320 : 0;
    const std::span<std::byte> changed(call.request().data() + first,
                                       shm::ArenaRounded(request_bytes) + reply_bytes - first);
    std::atomic<bool> stop{false};
    std::thread scribbler([&, seed = random_()] {
      std::mt19937_64 random(seed);
      while (!stop.load(std::memory_order_relaxed)) {
        const size_t at = random() % (changed.size() / 8) * 8;
        std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(changed.data() + at))
            .store(random(), std::memory_order_relaxed);
      }
    });
    const shm::CallState submitted = hostile.channel().Submit(shm::kAttend, deadline, &call);
    const DataAttention found = other.Attend(others_item);
    const shm::CallState answered = hostile.channel().Wait(deadline, &call);
    stop.store(true);
    scribbler.join();
    ASSERT_EQ(submitted, shm::CallState::kAnswered);
    ASSERT_EQ(answered, shm::CallState::kAnswered);
    ASSERT_TRUE(found.status.ok()) << found.status;
    ASSERT_EQ(found.out, expected.out);
    ASSERT_EQ(found.lse, expected.lse);
  }
  // Nor its own sequence.
  EXPECT_EQ(hostile.Attend(own_item).out, Attend(own, 0, own_query.vectors).out);
}

// Rows that flip between a number and NaN while the engine reads them: whatever was taken is
// finite, and what was not is not there.
TEST_F(DataFuzzTest, RowsThatChangeUnderTheEngineNeverBecomeNaN) {
  DataPeer peer = Connect();
  const SequenceRef sequence = Create(SmallSpec(8192));
  const uint16_t nan = FloatToBF16(std::numeric_limits<float>::quiet_NaN());
  const uint16_t one = FloatToBF16(1.0f);
  constexpr int kRounds = 100;
  const TokenData data(shape(), kRounds * 32, seed_);
  uint64_t held = 0;
  int refused = 0;
  for (int round = 0; round < kRounds; ++round) {
    const ChunkBuffers chunk(data, sequence, {0, 1}, held, 32);
    const shm::InsertRequest request{.sequence_id = sequence.id.value(),
                                     .generation = sequence.generation.value(),
                                     .first_position = held,
                                     .layers = chunk.layers,
                                     .keys = ToRef(chunk.chunk.keys),
                                     .values = ToRef(chunk.chunk.values)};
    const shm::InsertPlaces places = shm::PlaceInsert(request);
    const shm::TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    shm::ClientChannel::Call call;
    ASSERT_EQ(peer.channel().Begin(places.bytes, 1024, deadline, &call), shm::CallState::kAnswered);
    shm::EncodeInsert(request, call.request());
    // One element near the end of the keys, which the engine reaches last.
    std::byte* const target =
        call.request().data() + places.keys_offset + chunk.keys.size() - 2 * (1 + random_() % 32);
    std::atomic<bool> stop{false};
    std::thread writer([&] {
      const std::atomic_ref<uint16_t> element(*reinterpret_cast<uint16_t*>(target));
      while (!stop.load(std::memory_order_relaxed)) {
        element.store(nan, std::memory_order_relaxed);
        element.store(one, std::memory_order_relaxed);
      }
    });
    ASSERT_EQ(peer.channel().Submit(shm::kInsert, deadline, &call), shm::CallState::kAnswered);
    const shm::CallState state = peer.channel().Wait(deadline, &call);
    stop.store(true);
    writer.join();
    ASSERT_EQ(state, shm::CallState::kAnswered);
    if (call.code() == absl::StatusCode::kOk) {
      held += 32;
    } else {
      ASSERT_EQ(call.code(), absl::StatusCode::kInvalidArgument) << call.status();
      ++refused;
    }
    ASSERT_EQ(StatusOf(sequence).token_count, held);
  }
  std::cout << held / 32 << " chunks taken, " << refused << " refused" << std::endl;
  if (held == 0) return;
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const QueryBuffers query(shape(), sequence, layer, RandomQueries(shape(), seed_));
    const QueryOutcome rows = engine_->Query(kTenant, query.query, {.inline_rows = true}).value();
    for (const HeadZones& head : rows.heads) {
      const size_t count = head.inline_keys.size() / 2;
      EXPECT_EQ(FirstNonFinite(DType::kBF16, head.inline_keys.data(), count), count);
    }
    for (const float value : Attend(sequence, layer, query.vectors, true).out) {
      ASSERT_TRUE(std::isfinite(value));
    }
  }
}

}  // namespace
}  // namespace wavekv::testing
