// The daemon's own listening UNIX socket: bound once, by one process, and every connection's peer
// known before a byte of it is read (docs/decisions/001-identity-and-sockets.md).
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "storage/base/fd_socket.h"
#include "storage/base/file_lock.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

class UnixAcceptor {
 public:
  // Takes an accepted, non-blocking connection. Called from the acceptor's thread; must not block.
  using Callback = std::function<void(UniqueFd connection, const PeerCredentials& peer)>;

  // Locks "<path>.lock" and binds `path` with file mode `mode`; a socket file that a dead daemon
  // left is replaced. AlreadyExists, naming the address: a daemon is there. FailedPrecondition:
  // `path` is no socket.
  static absl::StatusOr<std::unique_ptr<UnixAcceptor>> Listen(const std::string& path, mode_t mode);
  // Stops, and removes the socket file if it still is ours.
  ~UnixAcceptor();
  UnixAcceptor(const UnixAcceptor&) = delete;
  UnixAcceptor& operator=(const UnixAcceptor&) = delete;

  // Starts to accept. Once.
  void Start(Callback callback);
  // No callback runs after this. Later connections are refused by the kernel.
  void Stop();

 private:
  UnixAcceptor(FileLock lock, UniqueFd listener, UniqueFd wakeup, std::string path);
  void Run(const Callback& callback);

  const FileLock lock_;
  UniqueFd listener_;
  UniqueFd wakeup_;
  const std::string path_;
  dev_t device_ = 0;  // Of the socket file, so that a successor's is left alone.
  ino_t inode_ = 0;
  std::thread thread_;
};

}  // namespace wavekv
