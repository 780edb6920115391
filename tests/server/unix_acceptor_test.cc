// The daemon's listening socket: one owner, known peers.

#include "daemon/server/unix_acceptor.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <future>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/temp_dir.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

UniqueFd Connect(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    fd.reset();
  }
  return fd;
}

// A socket file whose owner is gone.
void LeaveStaleSocket(const std::string& path) {
  const UniqueFd fd(socket(AF_UNIX, SOCK_STREAM, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
}

class UnixAcceptorTest : public ::testing::Test {
 protected:
  const TempDir directory_;
  const std::string path_ = directory_.path() + "/s";
};

TEST_F(UnixAcceptorTest, TellsThePeer) {
  absl::StatusOr<std::unique_ptr<UnixAcceptor>> acceptor = UnixAcceptor::Listen(path_, 0600);
  ASSERT_TRUE(acceptor.ok()) << acceptor.status();
  std::promise<PeerCredentials> met;
  (*acceptor)->Start([&met](UniqueFd connection, const PeerCredentials& peer) {
    EXPECT_TRUE(connection.valid());
    met.set_value(peer);
  });
  const UniqueFd client = Connect(path_);
  ASSERT_TRUE(client.valid());
  const PeerCredentials peer = met.get_future().get();
  EXPECT_EQ(peer.uid, geteuid());
  EXPECT_EQ(peer.pid, getpid());
}

TEST_F(UnixAcceptorTest, HasTheModeAskedForWhateverTheUmask) {
  for (const mode_t umask_bits : {0077, 0022, 0000}) {
    for (const mode_t mode : {0600, 0660, 0666}) {
      const mode_t before = umask(umask_bits);
      const auto acceptor = UnixAcceptor::Listen(path_, mode);
      umask(before);
      ASSERT_TRUE(acceptor.ok()) << acceptor.status();
      struct stat info {};
      ASSERT_EQ(stat(path_.c_str(), &info), 0);
      EXPECT_EQ(info.st_mode & 0777, mode);
    }
  }
}

TEST_F(UnixAcceptorTest, ASecondOwnerIsRefusedByNameAndTheFirstGoesOn) {
  absl::StatusOr<std::unique_ptr<UnixAcceptor>> first = UnixAcceptor::Listen(path_, 0600);
  ASSERT_TRUE(first.ok());
  std::promise<void> met;
  (*first)->Start([&met](UniqueFd, const PeerCredentials&) { met.set_value(); });
  const absl::Status second = UnixAcceptor::Listen(path_, 0600).status();
  EXPECT_TRUE(absl::IsAlreadyExists(second)) << second;
  EXPECT_THAT(std::string(second.message()), HasSubstr("unix:" + path_));
  const UniqueFd client = Connect(path_);
  EXPECT_TRUE(client.valid());
  met.get_future().get();
}

TEST_F(UnixAcceptorTest, AnotherProgramsLiveSocketIsNotTaken) {
  absl::StatusOr<std::unique_ptr<UnixAcceptor>> first = UnixAcceptor::Listen(path_, 0600);
  ASSERT_TRUE(first.ok());
  // Whoever listens there has no lock of ours.
  ASSERT_EQ(rename((path_ + ".lock").c_str(), (path_ + ".moved").c_str()), 0);
  const absl::Status second = UnixAcceptor::Listen(path_, 0600).status();
  EXPECT_TRUE(absl::IsAlreadyExists(second)) << second;
  EXPECT_TRUE(Connect(path_).valid());
}

TEST_F(UnixAcceptorTest, AStaleSocketIsReplaced) {
  LeaveStaleSocket(path_);
  EXPECT_FALSE(Connect(path_).valid());
  const auto acceptor = UnixAcceptor::Listen(path_, 0600);
  ASSERT_TRUE(acceptor.ok()) << acceptor.status();
  EXPECT_TRUE(Connect(path_).valid());
}

TEST_F(UnixAcceptorTest, AFileThatIsNoSocketIsLeftAlone) {
  std::ofstream(path_) << "precious";
  const absl::Status status = UnixAcceptor::Listen(path_, 0600).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_EQ(access(path_.c_str(), F_OK), 0);
}

TEST_F(UnixAcceptorTest, RemovesItsSocketButNotASuccessors) {
  absl::StatusOr<std::unique_ptr<UnixAcceptor>> acceptor = UnixAcceptor::Listen(path_, 0600);
  ASSERT_TRUE(acceptor.ok());
  acceptor->reset();
  EXPECT_NE(access(path_.c_str(), F_OK), 0);

  acceptor = UnixAcceptor::Listen(path_, 0600);
  ASSERT_TRUE(acceptor.ok());
  ASSERT_EQ(unlink(path_.c_str()), 0);
  std::ofstream(path_) << "a successor's";
  acceptor->reset();
  EXPECT_EQ(access(path_.c_str(), F_OK), 0);
}

}  // namespace
}  // namespace wavekv
