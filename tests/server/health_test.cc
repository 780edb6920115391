// Health checking, reflection, metrics, and the way down.

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/rpc/address.h"
#include "storage/base/log.h"
#include "storage/base/unique_fd.h"
#include "tests/server/raw_call.h"
#include "tests/server/test_server.h"
#include "tests/unread_pipe.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

// grpc.health.v1.HealthCheckResponse{status}
constexpr char kServing[] = "\x08\x01";
constexpr char kNotServing[] = "\x08\x02";

grpc::ByteBuffer Bytes(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// GET `path` of "host:port", the whole answer.
std::string HttpGet(const std::string& address, const std::string& path) {
  const Address parsed = *ParseAddress(address);
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(parsed.port);
  target.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&target), sizeof target) != 0) return "";
  const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
  if (write(fd.get(), request.data(), request.size()) < 0) return "";
  std::string answer;
  char chunk[4096];
  for (ssize_t count = 0; (count = read(fd.get(), chunk, sizeof chunk)) > 0;) {
    answer.append(chunk, static_cast<size_t>(count));
  }
  return answer;
}

TEST(HealthTest, ServesHealthAndReflectionWithoutALease) {
  TestServer server;
  TestClient client(server.address());
  const RawReply health =
      RawCall(client.channel(), "/grpc.health.v1.Health/Check", "", client.Context());
  ASSERT_TRUE(health.status.ok()) << health.status.error_message();
  EXPECT_THAT(health.messages, ::testing::ElementsAre(kServing));
  // ServerReflectionRequest{list_services: ""}
  const RawReply services =
      RawCall(client.channel(), "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
              std::string("\x3a\x00", 2), client.Context());
  ASSERT_TRUE(services.status.ok()) << services.status.error_message();
  ASSERT_EQ(services.messages.size(), 1u);
  EXPECT_THAT(services.messages[0], HasSubstr("wavekv.v1.WaveKV"));
  EXPECT_THAT(services.messages[0], HasSubstr("grpc.health.v1.Health"));
}

TEST(ShutdownTest, HealthTurnsAndWaitingStreamsEndAtOnce) {
  TestServerOptions options;
  options.server.shutdown_grace_ms = 60'000;  // Nothing here may wait for it.
  TestServer server(options);
  TestClient client(server.address());
  ASSERT_TRUE(client.Attach().ok());
  const v1::SequenceRef sequence = client.Create(512);
  RawStream watch(client.channel(), "/grpc.health.v1.Health/Watch", client.Context());
  ASSERT_TRUE(watch.Write(Bytes("")));
  std::string health;
  ASSERT_TRUE(watch.Read(&health));
  EXPECT_EQ(health, kServing);

  const std::unique_ptr<grpc::ClientContext> decode_context = client.Context();
  const auto decode = client.stub()->Decode(decode_context.get());
  v1::AttendRequest request;
  v1::AttendItem* item = request.add_items();
  *item->mutable_sequence() = sequence;
  *item->mutable_queries() = TestQueries(0);
  v1::AttendReply reply;
  ASSERT_TRUE(decode->Write(request));
  ASSERT_TRUE(decode->Read(&reply));  // The stream is open and waits for us.
  const std::unique_ptr<grpc::ClientContext> insert_context = client.Context();
  v1::InsertReply inserted;
  const auto insert = client.stub()->Insert(insert_context.get(), &inserted);
  ASSERT_TRUE(insert->Write(TestChunk(sequence, 0, 8)));

  std::future<void> down =
      std::async(std::launch::async, [&server] { server.server()->Shutdown(); });
  ASSERT_TRUE(watch.Read(&health));
  EXPECT_EQ(health, kNotServing);
  EXPECT_EQ(decode->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(insert->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  watch.WritesDone();
  watch.Cancel();
  watch.Finish();
  EXPECT_EQ(down.wait_for(std::chrono::seconds(20)), std::future_status::ready);
  // The socket is gone: the next daemon finds nothing to step over.
  EXPECT_NE(access(ParseAddress(server.address())->path.c_str(), F_OK), 0);
}

TEST(MetricsTest, TellsWhatHappened) {
  TestServerOptions options;
  options.server.metrics_address = "127.0.0.1:0";
  TestServer server(options);
  TestClient client(server.address());
  ASSERT_TRUE(client.Attach().ok());
  const std::string tenant = "uid:" + std::to_string(geteuid());
  EXPECT_THAT(HttpGet(server.server()->metrics_address(), "/metrics"),
              HasSubstr("wavekv_tenant_clients{tenant=\"" + tenant + "\"} 1\n"))
      << "a tenant that holds nothing yet";
  const v1::SequenceRef sequence = client.Create(512);
  ASSERT_TRUE(client.Insert(sequence, 0, 100).ok());
  v1::DropSequenceRequest drop;
  drop.mutable_sequence()->set_sequence_id(99);
  v1::DropSequenceReply dropped;
  EXPECT_FALSE(client.stub()->DropSequence(client.Context().get(), drop, &dropped).ok());
  v1::AttendRequest request;
  v1::AttendItem* item = request.add_items();
  *item->mutable_sequence() = sequence;
  *item->mutable_queries() = TestQueries(0);
  v1::AttendReply attended;
  ASSERT_TRUE(client.stub()->Attend(client.Context().get(), request, &attended).ok());

  const std::string page = HttpGet(server.server()->metrics_address(), "/metrics");
  for (const std::string& line : {
           std::string("wavekv_pool_bytes_max 268435456\n"),
           std::string("wavekv_clients 1\n"),
           "wavekv_sequences{tenant=\"" + tenant + "\"} 1\n",
           "wavekv_tenant_clients{tenant=\"" + tenant + "\"} 1\n",
           std::string("wavekv_calls_total{code=\"OK\",rpc=\"CreateSequence\"} 1\n"),
           std::string("wavekv_calls_total{code=\"NOT_FOUND\",rpc=\"DropSequence\"} 1\n"),
           std::string("wavekv_latency_seconds_count{rpc=\"Attend\"} 1\n"),
           std::string("wavekv_latency_seconds_bucket{rpc=\"Attend\",le=\"+Inf\"} 1\n"),
           std::string("wavekv_steady_tokens_total 200\n"),  // 100 tokens of 2 KV heads.
           std::string("wavekv_build_queue 0\n"),
       }) {
    EXPECT_THAT(page, HasSubstr(line));
  }
}

TEST(MetricsTest, TellsOfLinesThatNobodyRead) {
  TestServerOptions options;
  options.server.metrics_address = "127.0.0.1:0";
  TestServer server(options);
  const uint64_t before = LogLinesLost();
  UnreadPipe pipe;
  pipe.Fill();
  {
    const StderrTo unread(pipe.write_end());
    TestClient client(server.address());
    ASSERT_TRUE(client.Attach().ok());
  }
  EXPECT_GT(LogLinesLost(), before) << "that it attached";
  EXPECT_THAT(HttpGet(server.server()->metrics_address(), "/metrics"),
              HasSubstr("wavekv_log_lines_lost_total " + std::to_string(LogLinesLost()) + "\n"));
}

}  // namespace
}  // namespace wavekv
