// RecordSequence over gRPC: a trace from the wire, and how it ends.

#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/trace/trace_layout.h"
#include "storage/trace/trace_state.h"
#include "tests/server/test_server.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

using Stream = std::unique_ptr<grpc::ClientReader<v1::RecordSequenceReply>>;

// A recording under way, and what it says. Every record must be one and follow from the others.
class WireRecording {
 public:
  WireRecording(TestClient* client, const v1::SequenceRef& sequence,
                std::vector<uint32_t> layers = {}, uint64_t steps = 0)
      : context_(client->Context()) {
    v1::RecordSequenceRequest request;
    *request.mutable_sequence() = sequence;
    request.mutable_layers()->Assign(layers.begin(), layers.end());
    request.set_steps(steps);
    stream_ = client->stub()->RecordSequence(context_.get(), request);
  }

  // Reads one message. False: there are no more.
  bool Read() {
    v1::RecordSequenceReply reply;
    if (!stream_->Read(&reply)) return false;
    auto bytes = std::as_bytes(std::span(reply.records().data(), reply.records().size()));
    while (!bytes.empty()) {
      const auto framed = TakeTraceRecord(&bytes, next_number_++);
      EXPECT_TRUE(framed.ok()) << framed.status();
      if (!framed.ok()) return false;
      if (state_ == nullptr) {
        const auto sequence = DecodeTraceSequence(framed->payload);
        EXPECT_TRUE(sequence.ok()) << sequence.status();
        if (!sequence.ok()) return false;
        sequence_ = *sequence;
        state_ = std::make_unique<TraceState>(sequence_);
        continue;
      }
      const auto record = DecodeTrace(framed->type, sequence_.shape, framed->payload);
      EXPECT_TRUE(record.ok()) << record.status();
      if (!record.ok()) return false;
      const absl::Status admitted = state_->Admit(*record);
      EXPECT_TRUE(admitted.ok()) << admitted;
      records.push_back(*record);
    }
    return true;
  }
  // Reads until the trace holds its sequence: the recording has begun.
  void AwaitBegin() {
    while (state_ == nullptr && Read()) continue;
    ASSERT_NE(state_, nullptr);
  }
  grpc::Status ReadAll() {
    while (Read()) continue;
    return stream_->Finish();
  }
  grpc::Status Finish() { return stream_->Finish(); }
  void Cancel() { context_->TryCancel(); }

  const TraceSequence& sequence() const { return sequence_; }
  const TraceEnd& end() const { return std::get<TraceEnd>(records.back()); }

  std::vector<TraceRecord> records;

 private:
  std::unique_ptr<grpc::ClientContext> context_;
  Stream stream_;
  uint64_t next_number_ = 0;
  TraceSequence sequence_;
  std::unique_ptr<TraceState> state_;
};

class RecordTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(client_.Attach().ok());
    ASSERT_TRUE(recorder_.Attach().ok());
    sequence_ = client_.Create(512);
    ASSERT_TRUE(client_.Insert(sequence_, 0, 100).ok());
  }
  v1::AttendReply Attend(uint32_t layer, uint64_t seed) {
    v1::AttendRequest request;
    v1::AttendItem* item = request.add_items();
    *item->mutable_sequence() = sequence_;
    item->set_layer(layer);
    *item->mutable_queries() = TestQueries(seed);
    v1::AttendReply reply;
    EXPECT_TRUE(client_.stub()->Attend(client_.Context().get(), request, &reply).ok());
    return reply;
  }
  // Waits, with a bound, until nothing is recorded.
  bool NothingIsRecorded() {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (server_.engine()->Stats().recordings > 0) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  TestServer server_;
  TestClient client_{server_.address()};
  TestClient recorder_{server_.address()};  // Somebody else of the same tenant.
  v1::SequenceRef sequence_;
};

TEST_F(RecordTest, ATraceFromTheWire) {
  WireRecording recording(&recorder_, sequence_, {1}, /*steps=*/2);
  recording.AwaitBegin();
  EXPECT_EQ(recording.sequence().layers, (std::vector<TraceLayer>{{1, 100}}));
  const v1::AttendReply answer = Attend(1, 5);
  Attend(0, 6);  // Of a layer that is not recorded.
  ASSERT_TRUE(client_.Insert(sequence_, 100, 3).ok());
  Attend(1, 7);
  ASSERT_TRUE(recording.ReadAll().ok());
  EXPECT_EQ(recording.end().reason, TraceEndReason::kSteps);
  ASSERT_EQ(recording.records.size(), 5u);  // Stored rows, step, inserted rows, step, end.
  const auto& stored = std::get<TraceRows>(recording.records[0]);
  for (uint64_t token = 0; token < 100; ++token) {
    for (uint32_t head = 0; head < 2; ++head) {
      const std::vector<float> key = TestKey(1, token, head);
      ASSERT_EQ(std::memcmp(stored.keys.data() + (token * 2 + head) * key.size() * sizeof(float),
                            key.data(), key.size() * sizeof(float)),
                0);
    }
  }
  const auto& step = std::get<TraceStep>(recording.records[1]);
  const std::string& out = answer.results(0).out().data();
  ASSERT_EQ(out.size(), step.out.size() * sizeof(float));
  EXPECT_EQ(std::memcmp(out.data(), step.out.data(), out.size()), 0);
  EXPECT_EQ(std::get<TraceRows>(recording.records[2]).token_count, 3u);
  EXPECT_TRUE(NothingIsRecorded());
}

TEST_F(RecordTest, Refusals) {
  v1::SequenceRef unknown;
  unknown.set_sequence_id(sequence_.sequence_id() + 1);
  v1::SequenceRef stale = sequence_;
  stale.set_generation(7);
  EXPECT_EQ(WireRecording(&recorder_, {}).ReadAll().error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(WireRecording(&recorder_, unknown).ReadAll().error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(WireRecording(&recorder_, stale).ReadAll().error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_EQ(WireRecording(&recorder_, sequence_, {2}).ReadAll().error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  TestClient stranger(server_.address());
  EXPECT_EQ(WireRecording(&stranger, sequence_).ReadAll().error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  // As many as may be, and one.
  std::vector<std::unique_ptr<WireRecording>> recordings;
  for (int i = 0; i < 4; ++i) {
    recordings.push_back(std::make_unique<WireRecording>(&recorder_, sequence_));
    recordings.back()->AwaitBegin();
  }
  const grpc::Status refused = WireRecording(&recorder_, sequence_).ReadAll();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), HasSubstr("--recordings_max"));
  for (const auto& recording : recordings) {
    recording->Cancel();
    recording->ReadAll();
  }
  EXPECT_TRUE(NothingIsRecorded());
}

TEST_F(RecordTest, AClientThatGoesEndsIt) {
  WireRecording recording(&recorder_, sequence_);
  recording.AwaitBegin();
  EXPECT_EQ(server_.engine()->Stats().recordings, 1u);
  recording.Cancel();
  EXPECT_EQ(recording.ReadAll().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(NothingIsRecorded());
  EXPECT_EQ(Attend(0, 1).results(0).error_code(), 0u);
}

TEST_F(RecordTest, DropAndShutdownEndTheTraceAsItShouldBe) {
  WireRecording dropped(&recorder_, sequence_);
  dropped.AwaitBegin();
  v1::DropSequenceRequest request;
  *request.mutable_sequence() = sequence_;
  v1::DropSequenceReply reply;
  ASSERT_TRUE(client_.stub()->DropSequence(client_.Context().get(), request, &reply).ok());
  EXPECT_TRUE(dropped.ReadAll().ok());
  EXPECT_EQ(dropped.end().reason, TraceEndReason::kDropped);

  const v1::SequenceRef next = client_.Create(512);
  WireRecording recording(&recorder_, next);
  recording.AwaitBegin();
  std::thread shutdown([&] { server_.server()->Shutdown(); });
  const grpc::Status status = recording.ReadAll();
  shutdown.join();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(recording.end().reason, TraceEndReason::kDaemonStopped);
}

// A recorder that reads nothing is told so in the end; the steps are answered all the time.
TEST_F(RecordTest, ASlowReaderLosesTheRecordingAndNobodyElse) {
  WireRecording recording(&recorder_, sequence_);
  recording.AwaitBegin();
  v1::AttendRequest request;
  for (int i = 0; i < 16; ++i) {
    v1::AttendItem* item = request.add_items();
    *item->mutable_sequence() = sequence_;
    *item->mutable_queries() = TestQueries(0);
  }
  // Fills gRPC's buffers, then the queue, 22 KB at a time; what waited goes all at once.
  uint64_t queued = 0;
  for (int i = 0; i < 20'000; ++i) {
    v1::AttendReply reply;
    ASSERT_TRUE(client_.stub()->Attend(client_.Context().get(), request, &reply).ok());
    const uint64_t now = server_.engine()->Stats().recording_queued_bytes;
    if (queued > (1u << 19) && now == 0) break;
    queued = now;
  }
  const grpc::Status status = recording.ReadAll();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("bytes were waiting to be read"));
  EXPECT_TRUE(NothingIsRecorded());
}

}  // namespace
}  // namespace wavekv
