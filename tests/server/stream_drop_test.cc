// Connections that break at any point cost nothing once their lease is over, and wait for nobody
// (rows 2, 9 and 26 of the list of faults).

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/server/test_server.h"

namespace wavekv {
namespace {

constexpr int kRounds = 1000;
// Of 9 KB each: more than all the buffers between client and server hold.
constexpr int kWritesMax = 100'000;

// Does some of a client's work, then breaks off at a random operation, in a random way.
void WorkAndBreakOff(const std::string& address, std::mt19937_64* random) {
  TestClient client(address);
  if (!client.Attach(500).ok()) return;
  const v1::SequenceRef sequence = client.Create(256);
  const std::unique_ptr<grpc::ClientContext> context = client.Context();
  // A random deadline may strike at any instruction of the rest.
  if ((*random)() % 2 == 0) {
    context->set_deadline(std::chrono::system_clock::now() +
                          std::chrono::microseconds((*random)() % 5000));
  }
  const uint64_t messages = (*random)() % 4;
  switch ((*random)() % 3) {
    case 0: {
      v1::InsertReply reply;
      const auto writer = client.stub()->Insert(context.get(), &reply);
      for (uint64_t i = 0; i < messages; ++i) writer->Write(TestChunk(sequence, i * 16, 16));
      context->TryCancel();
      writer->Finish();
      break;
    }
    case 1: {
      const auto stream = client.stub()->Decode(context.get());
      v1::AttendRequest request;
      v1::AttendItem* item = request.add_items();
      *item->mutable_sequence() = sequence;
      *item->mutable_queries() = TestQueries(0);
      // Answers are left unread.
      for (uint64_t i = 0; i < messages; ++i) stream->Write(request);
      context->TryCancel();
      stream->Finish();
      break;
    }
    default: {
      client.Insert(sequence, 0, 128);
      v1::BuildIndexRequest request;
      *request.mutable_sequence() = sequence;
      const auto reader = client.stub()->BuildIndex(context.get(), request);
      context->TryCancel();
      reader->Finish();
      break;
    }
  }
  // Sometimes the client says good-bye, mostly it is just gone.
  if ((*random)() % 4 == 0) {
    v1::DetachReply detached;
    client.stub()->Detach(client.Context().get(), {}, &detached);
  }
}

TEST(StreamDropTest, LiveBytesReturnToNothing) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  TestServerOptions options;
  options.server.sequences_max = 4096;
  TestServer server(options);
  TestClient bystander(server.address());
  ASSERT_TRUE(bystander.Attach().ok());
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      std::mt19937_64 random(seed + static_cast<uint64_t>(thread));
      for (int round = 0; round < kRounds / 4; ++round) {
        WorkAndBreakOff(server.address(), &random);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  v1::HeartbeatReply reply;
  EXPECT_TRUE(bystander.stub()->Heartbeat(bystander.Context().get(), {}, &reply).ok());
  EXPECT_TRUE(server.BecomesEmpty());
}

// Row 9: what a broken stream has left is no obstacle to the next one.
TEST(StreamDropTest, ABrokenInsertGoesOnWhereItStood) {
  TestServer server;
  TestClient client(server.address());
  ASSERT_TRUE(client.Attach().ok());
  const v1::SequenceRef sequence = client.Create(512);
  {
    const std::unique_ptr<grpc::ClientContext> context = client.Context();
    v1::InsertReply reply;
    const auto writer = client.stub()->Insert(context.get(), &reply);
    ASSERT_TRUE(writer->Write(TestChunk(sequence, 0, 100)));
    context->TryCancel();
    EXPECT_EQ(writer->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  // Whether the first message was in or not, the whole again is right.
  EXPECT_TRUE(client.Insert(sequence, 0, 100).ok());
  EXPECT_TRUE(client.Insert(sequence, 100, 100).ok());
}

// Row 2: a client that reads nothing does not hold up another.
TEST(StreamDropTest, ASlowReaderCostsOneAnswer) {
  TestServer server;
  TestClient slow(server.address());
  TestClient other(server.address());
  ASSERT_TRUE(slow.Attach().ok());
  ASSERT_TRUE(other.Attach().ok());
  const v1::SequenceRef sequence = slow.Create(512);
  ASSERT_TRUE(slow.Insert(sequence, 0, 256).ok());
  v1::AttendRequest request;
  for (int i = 0; i < 16; ++i) {
    v1::AttendItem* item = request.add_items();
    *item->mutable_sequence() = sequence;
    *item->mutable_queries() = TestQueries(0);
  }
  // Writes until the server takes no more: it reads a request only once the answer before has left.
  const std::unique_ptr<grpc::ClientContext> context = slow.Context();
  const auto stream = slow.stub()->Decode(context.get());
  std::atomic<int> written = 0;
  std::thread writer([&] {
    while (written < kWritesMax && stream->Write(request)) ++written;
  });
  const v1::SequenceRef own = other.Create(512);
  ASSERT_TRUE(other.Insert(own, 0, 64).ok());
  // The other client is answered all the time, and sees the stream come to a stand.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  uint64_t answered = 0;
  int unchanged = 0;
  while (unchanged < 100 && std::chrono::steady_clock::now() < deadline) {
    v1::GetStatsReply stats;
    ASSERT_TRUE(other.stub()->GetStats(other.Context().get(), {}, &stats).ok());
    unchanged = stats.counters().steady_tokens() == answered ? unchanged + 1 : 0;
    answered = stats.counters().steady_tokens();
  }
  EXPECT_EQ(unchanged, 100);
  EXPECT_GT(answered, 0u);
  EXPECT_LT(written.load(), kWritesMax) << "the server has read all that was sent";
  context->TryCancel();
  writer.join();
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

}  // namespace
}  // namespace wavekv
