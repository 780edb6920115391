// Small messages with a file descriptor attached, over UNIX SOCK_SEQPACKET sockets.
//
// The peer may be hostile or half dead: messages are bounded, every wait has a time limit, and
// descriptors that were not asked for are closed.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

inline constexpr size_t kFdMessageBytesMax = size_t{64} << 10;

// Who the kernel says the peer was when it connected (or listened).
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};

// SO_PEERCRED of any connected UNIX socket.
absl::StatusOr<PeerCredentials> GetPeerCredentials(int socket_fd);

// A pidfd of the process that connected `socket_fd`; invalid where the kernel has none to give (an
// old one, or a peer in a process-id namespace that we do not see).
UniqueFd PeerProcess(int socket_fd, const PeerCredentials& peer);

struct FdMessage {
  std::string bytes;
  UniqueFd fd;  // Invalid when the message carried none.
};

// One connection. Not thread-safe; move it to the thread that uses it.
class FdSocket {
 public:
  // Connects to the socket at `path`. NotFound or Unavailable: nobody listens there;
  // DeadlineExceeded: the listener did not take the connection in time.
  static absl::StatusOr<FdSocket> Connect(const std::string& path,
                                          std::chrono::milliseconds timeout);
  // A connected pair, for tests and for handing one end to a child.
  static absl::StatusOr<std::pair<FdSocket, FdSocket>> Pair();

  explicit FdSocket(UniqueFd fd) : fd_(std::move(fd)) {}

  // Sends one message of 1 to kFdMessageBytesMax bytes; `fd` (borrowed, -1: none) goes with it.
  // Unavailable: the peer is gone. DeadlineExceeded: it does not read.
  absl::Status Send(absl::string_view bytes, int fd, std::chrono::milliseconds timeout);

  // Receives one whole message. Unavailable: the peer closed. DeadlineExceeded: it sent nothing.
  // InvalidArgument: longer than `bytes_max` or more than one descriptor (all of them are closed).
  absl::StatusOr<FdMessage> Receive(size_t bytes_max, std::chrono::milliseconds timeout);

  absl::StatusOr<PeerCredentials> Peer() const { return GetPeerCredentials(fd_.get()); }
  // For poll(2): readable when a message is there or the peer is gone.
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

// A listening socket that only its owner's uid can reach (mode 0600 from its first instant).
// Removes its path when destroyed. Thread-safe to accept from several threads.
class FdListener {
 public:
  // AlreadyExists: somebody listens at `path`, or it is no socket. A socket nobody listens on is
  // replaced; hold a FileLock when two starters may race. `mode` is the socket file's.
  static absl::StatusOr<FdListener> Listen(const std::string& path, mode_t mode = 0600);

  ~FdListener();
  FdListener(FdListener&&) noexcept = default;
  FdListener& operator=(FdListener&&) = delete;

  // DeadlineExceeded when nobody came in time.
  absl::StatusOr<FdSocket> Accept(std::chrono::milliseconds timeout);

  const std::string& path() const { return path_; }
  // For poll(2): readable when somebody waits to be accepted.
  int fd() const { return fd_.get(); }

 private:
  FdListener(UniqueFd fd, std::string path, dev_t device, ino_t inode)
      : fd_(std::move(fd)), path_(std::move(path)), device_(device), inode_(inode) {}

  UniqueFd fd_;
  std::string path_;
  dev_t device_ = 0;  // Of the socket file, so that a successor's is left alone.
  ino_t inode_ = 0;
};

}  // namespace wavekv
