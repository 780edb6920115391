#include "storage/base/fd_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/shared_memory.h"

namespace wavekv {
namespace {

using std::chrono::milliseconds;
constexpr milliseconds kLong{10000};
constexpr milliseconds kNone{0};

class FdSocketTest : public testing::Test {
 protected:
  FdSocketTest() {
    char name[] = "/tmp/wavekv-socket-XXXXXX";
    directory_ = ::mkdtemp(name);
    path_ = directory_ + "/s";
  }
  ~FdSocketTest() override { std::filesystem::remove_all(directory_); }

  std::string directory_;
  std::string path_;
};

int OpenFdCount() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    (void)entry;
    ++count;
  }
  return count;
}

// Sends `fds` with a message, which FdSocket itself refuses to.
void SendRaw(int socket, const std::string& bytes, const std::vector<int>& fds) {
  iovec payload{const_cast<char*>(bytes.data()), bytes.size()};
  std::vector<char> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(part), fds.data(), fds.size() * sizeof(int));
  ASSERT_EQ(::sendmsg(socket, &message, 0), static_cast<ssize_t>(bytes.size()));
}

TEST_F(FdSocketTest, PassesABytesAndADescriptor) {
  auto listener = FdListener::Listen(path_);
  ASSERT_TRUE(listener.ok()) << listener.status();
  auto client = FdSocket::Connect(path_, kLong);
  ASSERT_TRUE(client.ok()) << client.status();
  auto server = listener->Accept(kLong);
  ASSERT_TRUE(server.ok()) << server.status();

  auto memfd = CreateMemfd("passed", 4096);
  ASSERT_TRUE(memfd.ok());
  auto mapping = Mapping::Map(memfd->get(), 4096, Mapping::kReadWrite);
  ASSERT_TRUE(mapping.ok());
  mapping->data()[5] = std::byte{99};
  ASSERT_TRUE(server->Send("ticket", memfd->get(), kLong).ok());
  auto message = client->Receive(16, kLong);
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->bytes, "ticket");
  ASSERT_TRUE(message->fd.valid());
  EXPECT_NE(::fcntl(message->fd.get(), F_GETFD) & FD_CLOEXEC, 0);
  auto peer_mapping = Mapping::Map(message->fd.get(), 4096, Mapping::kReadOnly);
  ASSERT_TRUE(peer_mapping.ok());
  EXPECT_EQ(peer_mapping->data()[5], std::byte{99});

  auto peer = server->Peer();
  ASSERT_TRUE(peer.ok());
  EXPECT_EQ(peer->pid, ::getpid());
  EXPECT_EQ(peer->uid, ::getuid());
  EXPECT_EQ(peer->gid, ::getgid());
}

TEST_F(FdSocketTest, MessagesWithoutADescriptorCarryNone) {
  auto pair = FdSocket::Pair();
  ASSERT_TRUE(pair.ok());
  ASSERT_TRUE(pair->first.Send(std::string("a\0b", 3), -1, kLong).ok());
  auto message = pair->second.Receive(16, kLong);
  ASSERT_TRUE(message.ok());
  EXPECT_EQ(message->bytes, std::string("a\0b", 3));
  EXPECT_FALSE(message->fd.valid());
}

TEST_F(FdSocketTest, SocketFileIsPrivateWhateverTheUmask) {
  const mode_t before = ::umask(0);
  auto listener = FdListener::Listen(path_);
  ::umask(before);
  ASSERT_TRUE(listener.ok()) << listener.status();
  struct stat info;
  ASSERT_EQ(::stat(path_.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0600u);
}

TEST_F(FdSocketTest, SecondListenerIsRefusedAndTheFirstGoesOn) {
  auto first = FdListener::Listen(path_);
  ASSERT_TRUE(first.ok());
  auto second = FdListener::Listen(path_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(second.status().message().find(path_), absl::string_view::npos);
  // The refused one's probe is the first connection; the next is ours.
  EXPECT_TRUE(FdSocket::Connect(path_, kLong).ok());
  EXPECT_TRUE(first->Accept(kLong).ok());
}

TEST_F(FdSocketTest, StaleSocketIsReplacedAndPathRemovedAtTheEnd) {
  {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    const UniqueFd dead(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    ASSERT_EQ(::bind(dead.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  }
  EXPECT_EQ(FdSocket::Connect(path_, kLong).status().code(), absl::StatusCode::kUnavailable);
  {
    auto listener = FdListener::Listen(path_);
    ASSERT_TRUE(listener.ok()) << listener.status();
    EXPECT_TRUE(FdSocket::Connect(path_, kLong).ok());
  }
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_EQ(FdSocket::Connect(path_, kLong).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(FdSocketTest, FilesThatAreNoSocketsAreLeftAlone) {
  const UniqueFd file(::open(path_.c_str(), O_CREAT | O_WRONLY, 0600));
  ASSERT_TRUE(file.valid());
  EXPECT_EQ(FdListener::Listen(path_).status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(std::filesystem::exists(path_));
}

TEST_F(FdSocketTest, PathsThatDoNotFitAreRefused) {
  const std::string path = directory_ + "/" + std::string(200, 'x');
  EXPECT_EQ(FdListener::Listen(path).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FdSocket::Connect(path, kLong).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FdSocket::Connect("", kLong).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(FdSocketTest, EveryWaitHasALimit) {
  auto listener = FdListener::Listen(path_);
  ASSERT_TRUE(listener.ok());
  EXPECT_EQ(listener->Accept(kNone).status().code(), absl::StatusCode::kDeadlineExceeded);
  auto pair = FdSocket::Pair();
  ASSERT_TRUE(pair.ok());
  EXPECT_EQ(pair->first.Receive(16, kNone).status().code(), absl::StatusCode::kDeadlineExceeded);
  absl::Status status;
  for (int i = 0; i < 100000 && status.ok(); ++i) {
    status = pair->first.Send(std::string(4096, 'x'), -1, kNone);
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << "nobody reads";
  std::vector<FdSocket> waiting;  // Fill the backlog: the next connect has to wait.
  for (int i = 0; i < 100000 && status.code() == absl::StatusCode::kDeadlineExceeded; ++i) {
    auto client = FdSocket::Connect(path_, milliseconds(1));
    if (!client.ok()) {
      EXPECT_EQ(client.status().code(), absl::StatusCode::kDeadlineExceeded) << client.status();
      break;
    }
    waiting.push_back(*std::move(client));
    ASSERT_LT(waiting.size(), 10000u);
  }
}

TEST_F(FdSocketTest, DeadPeersAreUnavailable) {
  auto pair = FdSocket::Pair();
  ASSERT_TRUE(pair.ok());
  { const FdSocket gone = std::move(pair->second); }
  EXPECT_EQ(pair->first.Send("x", -1, kLong).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(pair->first.Receive(16, kLong).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(FdSocketTest, OwnMessagesAreBounded) {
  auto pair = FdSocket::Pair();
  ASSERT_TRUE(pair.ok());
  EXPECT_EQ(pair->first.Send("", -1, kLong).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(pair->first.Send(std::string(kFdMessageBytesMax + 1, 'x'), -1, kLong).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(FdSocketTest, HostileMessagesLeaveNoDescriptorBehind) {
  struct Row {
    const char* why;
    size_t bytes;
    size_t fds;
  };
  const Row rows[] = {
      {"two descriptors where one is allowed", 4, 2},
      {"more descriptors than the control buffer holds", 4, 100},
      {"too long, with one descriptor", 17, 1},
      {"too long, with many descriptors", 17, 30},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    auto pair = FdSocket::Pair();
    ASSERT_TRUE(pair.ok());
    const int before = OpenFdCount();
    SendRaw(pair->first.fd(), std::string(row.bytes, 'x'),
            std::vector<int>(row.fds, STDERR_FILENO));
    EXPECT_EQ(pair->second.Receive(16, kLong).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(OpenFdCount(), before);
    // The connection itself is still in step: the next message comes through.
    ASSERT_TRUE(pair->first.Send("next", -1, kLong).ok());
    auto next = pair->second.Receive(16, kLong);
    ASSERT_TRUE(next.ok()) << next.status();
    EXPECT_EQ(next->bytes, "next");
  }
}

TEST_F(FdSocketTest, ReceiveWakesWhenTheMessageComes) {
  auto pair = FdSocket::Pair();
  ASSERT_TRUE(pair.ok());
  std::thread sender([&] { EXPECT_TRUE(pair->first.Send("late", -1, kLong).ok()); });
  auto message = pair->second.Receive(16, kLong);
  sender.join();
  ASSERT_TRUE(message.ok()) << message.status();
  EXPECT_EQ(message->bytes, "late");
}

}  // namespace
}  // namespace wavekv
