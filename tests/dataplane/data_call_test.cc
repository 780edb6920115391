// Calls over the channel answer what the engine answers, in the same words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "proto/shm/request_layout.h"
#include "tests/dataplane/data_fixture.h"
#include "tests/engine/fake_stager.h"

namespace wavekv::testing {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kTokens = 1500;

class DataCallTest : public DataPlaneTest {
 protected:
  DataCallTest() : data_(shape(), kTokens + 8, seed_), peer_(Connect()), sequence_(Create(spec_)) {}

  absl::Status InsertOver(DataPeer& peer, uint64_t first, uint64_t count,
                          Layout layout = Layout::kNHD) {
    const ChunkBuffers chunk(data_, sequence_, {0, 1}, first, count, layout);
    return peer.Insert(chunk.chunk);
  }
  shm::AttendItemRequest Item(const QueryBuffers& query) {
    shm::AttendItemRequest item;
    item.query = ToRequest(query.query);
    return item;
  }

  const uint64_t seed_ = FreshSeed();
  TokenData data_;
  DataPeer peer_;
  SequenceRef sequence_;
};

TEST_F(DataCallTest, InsertedRowsAreWhatAttendReads) {
  ASSERT_TRUE(InsertOver(peer_, 0, 700).ok());
  ASSERT_TRUE(InsertOver(peer_, 700, kTokens - 700, Layout::kHND).ok());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const QueryBuffers query(shape(), sequence_, layer, RandomQueries(shape(), seed_ + layer));
    shm::AttendItemRequest item = Item(query);
    item.exact = true;
    const DataAttention found = peer_.Attend(item);
    ASSERT_TRUE(found.status.ok()) << found.status;
    EXPECT_EQ(found.token_count, kTokens);
    const OracleAnswer exact = ExactOracle(data_, layer, kTokens, query.vectors);
    EXPECT_LT(RelativeError(shape(), found.out, exact.out), 1e-3);
  }
}

// Bit for bit the engine's own answer, over a built index and every budget.
TEST_F(DataCallTest, AttendIsTheEnginesOwnAnswer) {
  ASSERT_TRUE(InsertOver(peer_, 0, kTokens).ok());
  Build(sequence_);
  struct Row {
    std::optional<shm::BudgetRef> budget;
    std::optional<ZoneBudget> same;
  };
  const Row rows[] = {
      {std::nullopt, std::nullopt},
      {shm::BudgetRef{.kind = shm::BudgetRefKind::kClusters, .value = 5},
       ZoneBudget{.kind = BudgetKind::kClusters, .value = 5, .sketch_clusters = 0}},
      {shm::BudgetRef{.kind = shm::BudgetRefKind::kCoverage, .value = 0.5, .clusters_max = 20},
       ZoneBudget{
           .kind = BudgetKind::kCoverage, .value = 0.5, .clusters_max = 20, .sketch_clusters = 0}},
      {shm::BudgetRef{.kind = shm::BudgetRefKind::kRatio, .value = 0.1, .estimate_ratio = 0.5},
       ZoneBudget{
           .kind = BudgetKind::kRatio, .value = 0.1, .estimate_ratio = 0.5, .sketch_clusters = 0}},
      {shm::BudgetRef{.kind = shm::BudgetRefKind::kError, .value = 0.2},
       ZoneBudget{.kind = BudgetKind::kError, .value = 0.2, .sketch_clusters = 0}},
  };
  for (const Row& row : rows) {
    const QueryBuffers query(shape(), sequence_, 1, RandomQueries(shape(), seed_));
    shm::AttendItemRequest item = Item(query);
    item.query.budget = row.budget;
    const DataAttention found = peer_.Attend(item);
    ASSERT_TRUE(found.status.ok()) << found.status;
    const AttendOutcome expected = Attend(sequence_, 1, query.vectors, false, row.same);
    EXPECT_EQ(found.out, expected.out);
    EXPECT_EQ(found.lse, expected.lse);
  }
}

TEST_F(DataCallTest, DecodeAppendsAndARetryIsTheSame) {
  ASSERT_TRUE(InsertOver(peer_, 0, 100).ok());
  const QueryBuffers query(shape(), sequence_, 0, RandomQueries(shape(), seed_));
  const ChunkBuffers token(data_, sequence_, {0}, 100, 1);
  const int64_t key_shape[] = {2, 32};
  const int64_t value_shape[] = {2, 48};
  shm::AttendItemRequest item = Item(query);
  item.append_keys = shm::TensorRef{.dtype = DType::kBF16, .shape = key_shape, .data = token.keys};
  item.append_values =
      shm::TensorRef{.dtype = DType::kBF16, .shape = value_shape, .data = token.values};
  item.append_position = 100;
  const DataAttention first = peer_.Attend(item);
  ASSERT_TRUE(first.status.ok()) << first.status;
  EXPECT_EQ(first.token_count, 101u);
  const DataAttention again = peer_.Attend(item);
  EXPECT_EQ(again.token_count, 101u);
  EXPECT_EQ(again.out, first.out);
  item.append_position = 150;
  EXPECT_EQ(peer_.Attend(item).status.code(), absl::StatusCode::kFailedPrecondition);
}

// Sequences of different lengths in one call; a bad item fails alone.
TEST_F(DataCallTest, ABatchAnswersInOrder) {
  ASSERT_TRUE(InsertOver(peer_, 0, 300).ok());
  const SequenceRef other = Create(spec_);
  Insert(other, data_, 0, 50);
  const QueryBuffers first(shape(), sequence_, 0, RandomQueries(shape(), seed_));
  const QueryBuffers second(shape(), other, 0, RandomQueries(shape(), seed_ + 1));
  const QueryBuffers unknown(shape(), {SequenceId(1), Generation(1)}, 0,
                             RandomQueries(shape(), seed_));
  const shm::AttendItemRequest items[] = {Item(first), Item(unknown), Item(second)};
  const std::vector<DataAttention> found = peer_.AttendBatch(items);
  ASSERT_TRUE(found[0].status.ok()) << found[0].status;
  EXPECT_EQ(found[1].status.code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(found[2].status.ok()) << found[2].status;
  EXPECT_EQ(found[0].out, Attend(sequence_, 0, first.vectors).out);
  EXPECT_EQ(found[2].out, Attend(other, 0, second.vectors).out);
}

// An Attend's reply, in an arena that held something else: records and answers, and between and
// behind them what was there before. Nothing of the daemon's memory comes along.
TEST_F(DataCallTest, AReplyIsItsAnswersAndNothingElse) {
  ASSERT_TRUE(InsertOver(peer_, 0, 300).ok());
  const QueryBuffers good(shape(), sequence_, 0, RandomQueries(shape(), seed_));
  const QueryBuffers unknown(shape(), {SequenceId(1), Generation(1)}, 0,
                             RandomQueries(shape(), seed_));
  const shm::AttendItemRequest items[] = {Item(unknown), Item(good)};
  const uint64_t request_bytes = shm::AttendBytes(items);
  const uint64_t reply_bytes = shm::AttendReplyBytes(2, 4, 48);
  const shm::TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  uint64_t needed = UINT64_MAX;  // As the first reply, without room, says.
  for (const std::function<uint64_t()>& room_of :
       std::vector<std::function<uint64_t()>>{[] { return 100; }, [&] { return reply_bytes; },
                                              [&] { return needed; }, [&] { return needed - 1; }}) {
    const uint64_t room = room_of();
    SCOPED_TRACE(room);
    shm::ClientChannel::Call call;
    ASSERT_EQ(peer_.channel().Begin(request_bytes, room + 4096, deadline, &call),
              shm::CallState::kAnswered);
    const std::span<std::byte> arena(call.request().data(),
                                     shm::ArenaRounded(request_bytes) + room + 4096);
    std::fill(arena.begin(), arena.end(), std::byte{0xaa});
    call = shm::ClientChannel::Call();
    ASSERT_EQ(peer_.channel().Begin(request_bytes, room, deadline, &call),
              shm::CallState::kAnswered);
    ASSERT_EQ(call.request().data(), arena.data()) << "the arena gives the first place again";
    shm::EncodeAttend(items, call.request());
    ASSERT_EQ(peer_.channel().Submit(shm::kAttend, deadline, &call), shm::CallState::kAnswered);
    ASSERT_EQ(peer_.channel().Wait(deadline, &call), shm::CallState::kAnswered);
    const auto reply = arena.subspan(shm::ArenaRounded(request_bytes));
    std::vector<bool> written(reply.size(), false);
    const auto note = [&written](uint64_t offset, uint64_t bytes) {
      std::fill_n(written.begin() + static_cast<ptrdiff_t>(offset), bytes, true);
    };
    if (room < needed && room < reply_bytes) {
      EXPECT_EQ(call.code(), absl::StatusCode::kResourceExhausted);
      needed = call.reply_bytes_needed();
      EXPECT_LE(needed, reply_bytes);
      for (size_t i = room; i < reply.size(); ++i) ASSERT_EQ(reply[i], std::byte{0xaa}) << i;
      continue;
    }
    ASSERT_EQ(call.code(), absl::StatusCode::kOk) << call.status();
    const shm::ReplyReader reader(call.reply());
    note(0, sizeof(shm::WireAttendReply) + 2 * sizeof(shm::WireAttendResult));
    for (size_t i = 0; i < 2; ++i) {
      const auto result = reader
                              .Get<shm::WireAttendResult>(sizeof(shm::WireAttendReply) +
                                                          i * sizeof(shm::WireAttendResult))
                              .value();
      for (const shm::WireRun& run : {result.out, result.lse, result.text}) {
        EXPECT_TRUE(reader.Run(run).ok());
        note(run.offset, run.bytes);
      }
      if (i == 0) continue;
      const AttendOutcome expected = Attend(sequence_, 0, good.vectors);
      std::vector<float> out(expected.out.size());
      ASSERT_TRUE(reader.Copy(result.out, out.size(), 4, out.data(), "out").ok());
      EXPECT_EQ(out, expected.out);
    }
    for (size_t i = 0; i < reply.size(); ++i) {
      ASSERT_TRUE(written[i] || reply[i] == std::byte{0xaa}) << i;
    }
  }
}

TEST_F(DataCallTest, QueryAndEstimateAreTheEnginesOwnAnswers) {
  ASSERT_TRUE(InsertOver(peer_, 0, kTokens).ok());
  Build(sequence_);
  const QueryBuffers query(shape(), sequence_, 1, RandomQueries(shape(), seed_));
  const shm::QueryRequest request{.query = ToRequest(query.query), .inline_rows = true};
  std::vector<std::byte> bytes(shm::QueryBytes(request));
  shm::EncodeQuery(request, bytes);
  // Too little room is said, with how much would do; that much does.
  shm::ClientChannel::Call call;
  const shm::TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  ASSERT_EQ(peer_.channel().Begin(bytes.size(), 1024, deadline, &call), shm::CallState::kAnswered);
  std::memcpy(call.request().data(), bytes.data(), bytes.size());
  ASSERT_EQ(peer_.channel().Submit(shm::kQuery, deadline, &call), shm::CallState::kAnswered);
  ASSERT_EQ(peer_.channel().Wait(deadline, &call), shm::CallState::kAnswered);
  EXPECT_EQ(call.code(), absl::StatusCode::kResourceExhausted);
  ASSERT_GT(call.reply_bytes_needed(), 1024u);
  const auto reply = peer_.Call(shm::kQuery, bytes, call.reply_bytes_needed());
  ASSERT_TRUE(reply.ok()) << reply.status();

  const QueryOutcome expected = engine_->Query(kTenant, query.query, {.inline_rows = true}).value();
  const shm::ReplyReader reader(*reply);
  const auto head = reader.Get<shm::WireQueryReply>(0).value();
  EXPECT_EQ(head.token_count, kTokens);
  ASSERT_EQ(head.head_count, expected.heads.size());
  for (size_t i = 0; i < expected.heads.size(); ++i) {
    const auto zones =
        reader.Get<shm::WireHeadZones>(sizeof head + i * sizeof(shm::WireHeadZones)).value();
    EXPECT_EQ(zones.steady_tokens, expected.heads[i].steady_tokens);
    EXPECT_EQ(zones.retrieved.bytes / sizeof(shm::WireCluster), expected.heads[i].retrieved.size());
    const auto keys = reader.Run(zones.inline_keys).value();
    ASSERT_EQ(keys.size(), expected.heads[i].inline_keys.size());
    EXPECT_EQ(std::memcmp(keys.data(), expected.heads[i].inline_keys.data(), keys.size()), 0);
    const auto positions = reader.Run(zones.inline_positions).value();
    EXPECT_EQ(
        std::memcmp(positions.data(), expected.heads[i].inline_positions.data(), positions.size()),
        0);
  }

  bytes.resize(shm::EstimateBytes(request.query));
  shm::EncodeEstimate(request.query, bytes);
  const auto estimated = peer_.Call(shm::kEstimate, bytes, shm::EstimateReplyBytes(4, 48));
  ASSERT_TRUE(estimated.ok()) << estimated.status();
  const EstimateOutcome same = engine_->Estimate(kTenant, query.query).value();
  const shm::ReplyReader estimate_reader(*estimated);
  const auto estimate = estimate_reader.Get<shm::WireEstimateReply>(0).value();
  std::vector<float> out(same.out.size());
  ASSERT_TRUE(estimate_reader.Copy(estimate.out, out.size(), 4, out.data(), "out").ok());
  EXPECT_EQ(out, same.out);
  std::vector<float> upper(same.lse_upper.size());
  ASSERT_TRUE(
      estimate_reader.Copy(estimate.lse_upper, upper.size(), 4, upper.data(), "upper").ok());
  EXPECT_EQ(upper, same.lse_upper);
}

// What the engine refuses is refused here, with the same status.
TEST_F(DataCallTest, RefusalsAreTheEnginesOwn) {
  ASSERT_TRUE(InsertOver(peer_, 0, 100).ok());
  struct Row {
    const char* what;
    std::function<void(ChunkBuffers*)> damage;
  };
  const Row rows[] = {
      {"a gap", [](ChunkBuffers* b) { b->chunk.first_position = 500; }},
      {"other bytes in the same range", [](ChunkBuffers* b) { b->chunk.first_position = 50; }},
      {"a stale generation", [](ChunkBuffers* b) { b->chunk.sequence.generation = Generation(9); }},
      {"no generation", [](ChunkBuffers* b) { b->chunk.sequence.generation = Generation(0); }},
      {"an unknown sequence", [](ChunkBuffers* b) { b->chunk.sequence.id = SequenceId(77); }},
      {"a layer twice",
       [](ChunkBuffers* b) {
         b->layers = {1, 1};
       }},
      {"a layer that is not",
       [](ChunkBuffers* b) {
         b->layers = {0, 7};
       }},
      {"too few heads",
       [](ChunkBuffers* b) {
         b->key_shape[2] = 1;
         b->key_shape[3] *= 2;
       }},
      {"a NaN key",
       [](ChunkBuffers* b) {
         const uint16_t nan = FloatToBF16(std::numeric_limits<float>::quiet_NaN());
         std::memcpy(b->keys.data() + 66, &nan, 2);
       }},
      {"an infinite value",
       [](ChunkBuffers* b) {
         const uint16_t infinity = FloatToBF16(std::numeric_limits<float>::infinity());
         std::memcpy(b->values.data() + b->values.size() - 2, &infinity, 2);
       }},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    ChunkBuffers chunk(data_, sequence_, {0, 1}, 100, 20);
    row.damage(&chunk);
    chunk.chunk.layers = chunk.layers;
    const absl::Status found = peer_.Insert(chunk.chunk);
    const absl::Status expected = engine_->Insert(kTenant, chunk.chunk).status();
    EXPECT_FALSE(found.ok());
    EXPECT_EQ(found, expected);
  }
  EXPECT_EQ(StatusOf(sequence_).token_count, 100u) << "nothing of the refused ones is there";
}

TEST_F(DataCallTest, UnknownVerbsAndDeadCallsAreAnswered) {
  std::vector<std::byte> nothing(64);
  EXPECT_EQ(peer_.Call(9, nothing, 1024).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_EQ(peer_.Call(0, nothing, 1024).status().code(), absl::StatusCode::kUnimplemented);
  // A deadline that has passed: the call does not begin.
  const uint64_t calls = clients_.calls.load();
  shm::ClientChannel::Call call;
  const shm::TimePoint late = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  ASSERT_EQ(peer_.channel().Begin(64, 1024, late, &call), shm::CallState::kAnswered);
  ASSERT_EQ(peer_.channel().Submit(shm::kEstimate, shm::TimePoint(), &call),
            shm::CallState::kAnswered);
  ASSERT_EQ(peer_.channel().Wait(late, &call), shm::CallState::kAnswered);
  EXPECT_EQ(call.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(clients_.calls.load(), calls + 1);
}

TEST_F(DataCallTest, ALeaseThatIsOverAnswersNothingElse) {
  clients_.refuse_calls.store(true);
  EXPECT_EQ(InsertOver(peer_, 0, 10).code(), absl::StatusCode::kUnauthenticated);
  EXPECT_EQ(StatusOf(sequence_).token_count, 0u);
}

TEST_F(DataCallTest, WhoMayHaveAChannel) {
  struct Row {
    const char* what;
    shm::Hello hello;
    absl::StatusCode code;
  };
  const Row rows[] = {
      {"an unknown secret",
       {.version = 1, .epoch = 1, .secret = std::string(16, '\0')},
       absl::StatusCode::kUnauthenticated},
      {"another version",
       {.version = 2, .epoch = 1, .secret = FakeClients::SecretOf(3)},
       absl::StatusCode::kFailedPrecondition},
      {"an earlier life",
       {.version = 1, .epoch = 9, .secret = FakeClients::SecretOf(3)},
       absl::StatusCode::kFailedPrecondition},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(TryConnect(row.hello).status().code(), row.code) << row.what;
  }
  EXPECT_EQ(plane_->channel_count(), 1u);
}

TEST_F(DataCallTest, ChannelsAreLimited) {
  StartPlane({.channels_max = 2});
  const DataPeer first = Connect(1);
  const DataPeer second = Connect(2);
  const auto third = TryConnect({.version = 1, .epoch = 1, .secret = FakeClients::SecretOf(3)});
  EXPECT_EQ(third.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(third.status().message()), HasSubstr("--data_channels_max"));
}

// A Query changes what others see: it stages rows, warms the block cache, counts. One without room
// for its answer is told so first; asked again with room, it has happened once.
TEST_F(DataCallTest, AQueryWithoutRoomForItsAnswerHasNotHappened) {
  const auto buffer = std::make_shared<FakeBuffer>();
  plane_.reset();
  StartEngine({.epoch = 3, .build_threads = 1, .compute_threads = 2}, uint64_t{256} << 20,
              CreateFakeStager(buffer));
  StartPlane({});
  peer_ = Connect();
  spec_.attach_wave_buffer = true;
  sequence_ = Create(spec_);
  ASSERT_TRUE(InsertOver(peer_, 0, kTokens).ok());
  Build(sequence_);
  const QueryBuffers query(shape(), sequence_, 1, RandomQueries(shape(), seed_));
  const shm::TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  uint64_t answered = 0;
  for (const bool inline_rows : {false, true}) {
    SCOPED_TRACE(inline_rows);
    shm::QueryRequest request{.query = ToRequest(query.query), .inline_rows = inline_rows};
    request.query.budget = shm::BudgetRef{.kind = shm::BudgetRefKind::kClusters, .value = 9};
    std::vector<std::byte> bytes(shm::QueryBytes(request));
    shm::EncodeQuery(request, bytes);
    const std::vector<std::byte> staged = buffer->bytes();
    const uint64_t counted = engine_->Stats().counters.steady_tokens;
    const auto needed_with = [&](uint64_t room) {
      shm::ClientChannel::Call call;
      EXPECT_EQ(peer_.channel().Begin(bytes.size(), room, deadline, &call),
                shm::CallState::kAnswered);
      std::memcpy(call.request().data(), bytes.data(), bytes.size());
      EXPECT_EQ(peer_.channel().Submit(shm::kQuery, deadline, &call), shm::CallState::kAnswered);
      EXPECT_EQ(peer_.channel().Wait(deadline, &call), shm::CallState::kAnswered);
      EXPECT_EQ(call.code(), absl::StatusCode::kResourceExhausted);
      EXPECT_THAT(std::string(call.status().message()), HasSubstr("the call left room for"));
      return call.reply_bytes_needed();
    };
    const uint64_t calls = clients_.calls.load();
    const uint64_t needed = needed_with(1024);
    EXPECT_EQ(needed_with(needed - 1), needed);
    EXPECT_EQ(clients_.calls.load(), calls);
    EXPECT_EQ(buffer->bytes(), staged);
    EXPECT_EQ(engine_->Stats().counters.steady_tokens, counted);
    EXPECT_EQ(StatusOf(sequence_).counters.steady_tokens, counted);

    const auto reply = peer_.Call(shm::kQuery, bytes, needed);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->size(), needed) << "all was staged";
    EXPECT_EQ(shm::ReplyReader(*reply).Get<shm::WireQueryReply>(0)->step, ++answered);
    EXPECT_GT(engine_->Stats().counters.steady_tokens, counted);

    buffer->SetRunsMax(1);  // The others move to estimation: the answer is shorter.
    const auto shorter = peer_.Call(shm::kQuery, bytes, needed);
    ASSERT_TRUE(shorter.ok()) << shorter.status();
    EXPECT_LT(shorter->size(), needed);
    EXPECT_EQ(shm::ReplyReader(*shorter).Get<shm::WireQueryReply>(0)->step, ++answered);
    buffer->SetRunsMax(UINT32_MAX);
  }
}

}  // namespace
}  // namespace wavekv::testing
