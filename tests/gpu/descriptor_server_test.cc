#include "storage/base/descriptor_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "storage/base/descriptor_protocol.h"
#include "storage/base/random.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/child_process.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

class DescriptorServerTest : public ::testing::Test {
 protected:
  void Start(const DescriptorServerOptions& options) {
    path_ = directory_.path() + "/tickets";
    server_ = DescriptorServer::Start(
                  FdListener::Listen(path_).value(), options,
                  [this](absl::string_view ticket, const PeerCredentials& peer, UniqueFd process) {
                    ++redeemed_;
                    return Redeem(ticket, peer, process);
                  })
                  .value();
  }
  absl::StatusOr<UniqueFd> Redeem(absl::string_view ticket, const PeerCredentials& peer,
                                  const UniqueFd& process) const {
    if (ticket != ticket_) return absl::NotFoundError("unknown ticket");
    if (peer.uid != ::getuid() || peer.pid != ::getpid() || !process.valid()) {
      return absl::InternalError("the peer is not who it is");
    }
    return CreateMemfd("descriptor_server_test", 4321);
  }
  // The one thing that matters after every attack.
  void ExpectServing() {
    const auto fd = FetchDescriptor(path_, ticket_, kWait);
    ASSERT_TRUE(fd.ok()) << fd.status();
    EXPECT_EQ(FileBytes(fd->get()).value(), 4321u);
  }

  TempDir directory_;
  std::string path_;
  const std::string ticket_ = RandomSecret();
  std::atomic<uint64_t> redeemed_{0};
  std::unique_ptr<DescriptorServer> server_;
};

TEST_F(DescriptorServerTest, TicketBuysADescriptor) {
  Start({});
  for (int i = 0; i < 100; ++i) ExpectServing();
}

TEST_F(DescriptorServerTest, RandomTicketsBuyNothing) {
  Start({});
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(FetchDescriptor(path_, RandomSecret(), kWait).status().code(),
              absl::StatusCode::kNotFound);
  }
  ExpectServing();
}

TEST_F(DescriptorServerTest, GarbageIsRefused) {
  Start({});
  struct Row {
    size_t bytes;
    bool with_descriptor;
  };
  const Row rows[] = {
      {1, false},      // Too short.
      {15, false},     // Just too short.
      {17, false},     // Just too long.
      {60000, false},  // Far too long.
      {16, true},      // A descriptor nobody asked for.
      {1, true},
  };
  const UniqueFd extra = CreateMemfd("extra", 1).value();
  std::mt19937_64 random(std::random_device{}());
  for (const Row& row : rows) {
    SCOPED_TRACE(testing::Message() << row.bytes << " bytes, descriptor " << row.with_descriptor);
    std::string bytes(row.bytes, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    FdSocket socket = FdSocket::Connect(path_, kWait).value();
    ASSERT_TRUE(socket.Send(bytes, row.with_descriptor ? extra.get() : -1, kWait).ok());
    const auto reply = socket.Receive(kDescriptorReplyBytesMax, kWait);
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_FALSE(reply->fd.valid());
    EXPECT_EQ(DecodeDescriptorReply(reply->bytes).code(), absl::StatusCode::kInvalidArgument);
    ExpectServing();
  }
  EXPECT_EQ(redeemed_, std::size(rows));  // Garbage never came that far; ExpectServing did.
}

TEST_F(DescriptorServerTest, PeersThatComeAndGoCostNothing) {
  Start({});
  for (int i = 0; i < 500; ++i) {
    FdSocket socket = FdSocket::Connect(path_, kWait).value();
    if (i % 2 == 0) {
      ASSERT_TRUE(socket.Send(ticket_, -1, kWait).ok());  // And does not wait for the answer.
    }
  }
  ExpectServing();
}

TEST_F(DescriptorServerTest, SilentPeersAreDroppedInTime) {
  DescriptorServerOptions options;
  options.ticket_wait_ms = 100;
  Start(options);
  FdSocket silent = FdSocket::Connect(path_, kWait).value();
  EXPECT_EQ(silent.Receive(16, kWait).status().code(), absl::StatusCode::kUnavailable);
  ExpectServing();
}

TEST_F(DescriptorServerTest, OneUidCannotTakeEveryPlace) {
  DescriptorServerOptions options;
  options.connections_max = 8;
  options.connections_per_uid_max = 3;
  options.ticket_wait_ms = 60'000;  // They would stay.
  Start(options);
  std::vector<FdSocket> waiting;
  for (int i = 0; i < 3; ++i) waiting.push_back(FdSocket::Connect(path_, kWait).value());
  FdSocket fourth = FdSocket::Connect(path_, kWait).value();
  const auto reply = fourth.Receive(kDescriptorReplyBytesMax, kWait);
  ASSERT_TRUE(reply.ok()) << reply.status();
  const absl::Status refused = DecodeDescriptorReply(reply->bytes);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("3 connections"));
  ASSERT_TRUE(waiting.back().Send(ticket_, -1, kWait).ok());  // Those that wait are served.
  EXPECT_TRUE(waiting.back().Receive(kDescriptorReplyBytesMax, kWait)->fd.valid());
  ASSERT_TRUE(WaitUntil([this] { return FetchDescriptor(path_, ticket_, kWait).ok(); }));
}

TEST_F(DescriptorServerTest, StopsWhilePeersWait) {
  Start({});
  std::vector<FdSocket> waiting;
  for (int i = 0; i < 5; ++i) waiting.push_back(FdSocket::Connect(path_, kWait).value());
  server_.reset();
  EXPECT_FALSE(FdSocket::Connect(path_, kWait).ok());
}

TEST(DescriptorProtocolTest, RepliesOfAHostileServerAreStatuses) {
  struct Row {
    std::string reply;
    absl::StatusCode code;
  };
  const Row rows[] = {
      {"", absl::StatusCode::kDataLoss},  // Nothing at all.
      {std::string("\0", 1), absl::StatusCode::kOk},
      {std::string("\0text", 5), absl::StatusCode::kDataLoss},  // OK has no text.
      {"\x05gone", absl::StatusCode::kNotFound},
      {"\x10who", absl::StatusCode::kUnauthenticated},  // The last code.
      {"\x11", absl::StatusCode::kDataLoss},            // Behind it.
      {"\xff", absl::StatusCode::kDataLoss},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(DecodeDescriptorReply(row.reply).code(), row.code) << row.reply;
  }
  const absl::Status status = absl::AbortedError(std::string(2000, 'x'));
  const std::string reply = EncodeDescriptorReply(status);
  EXPECT_EQ(reply.size(), kDescriptorReplyBytesMax);
  EXPECT_EQ(DecodeDescriptorReply(reply).code(), absl::StatusCode::kAborted);
}

}  // namespace
}  // namespace wavekv
