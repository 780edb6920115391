#include "daemon/server/unix_acceptor.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr int kBacklog = 128;
// How long to leave the socket alone when the process is out of descriptors.
constexpr int kExhaustedPauseMs = 100;

sockaddr_un SocketAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), std::min(path.size(), sizeof address.sun_path - 1));
  return address;
}

absl::StatusOr<UniqueFd> NewSocket(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot make a socket for unix:", path));
  }
  return fd;
}

// Makes way for bind(2): only a socket that nobody listens on may be removed.
absl::Status RemoveStaleSocket(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot examine unix:", path));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cannot listen on unix:", path, ": a file that is no socket is there; remove it"));
  }
  WAVEKV_ASSIGN_OR_RETURN(const UniqueFd probe, NewSocket(path));
  const sockaddr_un address = SocketAddress(path);
  if (connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ||
      errno == EAGAIN) {
    return absl::AlreadyExistsError(
        absl::StrCat("cannot listen on unix:", path,
                     ": another process serves it; stop it or choose another --listen"));
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot remove the stale socket ", path));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> Bind(const std::string& path, mode_t mode) {
  WAVEKV_ASSIGN_OR_RETURN(UniqueFd fd, NewSocket(path));
  const sockaddr_un address = SocketAddress(path);
  // The mode before bind(2) is what the file is born with, so that there is no moment in which
  // others can connect; the wanted mode follows, as the umask may have cut it.
  if (fchmod(fd.get(), 0600) != 0 ||
      bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      chmod(path.c_str(), mode) != 0 || listen(fd.get(), kBacklog) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot listen on unix:", path));
  }
  return fd;
}

}  // namespace

absl::StatusOr<std::unique_ptr<UnixAcceptor>> UnixAcceptor::Listen(const std::string& path,
                                                                   mode_t mode) {
  absl::StatusOr<FileLock> lock = FileLock::Acquire(path + ".lock");
  if (!lock.ok()) {
    return absl::Status(lock.status().code(), absl::StrCat("cannot listen on unix:", path, ": ",
                                                           lock.status().message()));
  }
  WAVEKV_RETURN_IF_ERROR(RemoveStaleSocket(path));
  WAVEKV_ASSIGN_OR_RETURN(UniqueFd listener, Bind(path, mode));
  UniqueFd wakeup(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wakeup.valid()) return absl::ErrnoToStatus(errno, "cannot make an eventfd");
  return std::unique_ptr<UnixAcceptor>(
      new UnixAcceptor(*std::move(lock), std::move(listener), std::move(wakeup), path));
}

UnixAcceptor::UnixAcceptor(FileLock lock, UniqueFd listener, UniqueFd wakeup, std::string path)
    : lock_(std::move(lock)),
      listener_(std::move(listener)),
      wakeup_(std::move(wakeup)),
      path_(std::move(path)) {
  struct stat info {};
  if (lstat(path_.c_str(), &info) == 0) {
    device_ = info.st_dev;
    inode_ = info.st_ino;
  }
}

UnixAcceptor::~UnixAcceptor() {
  Stop();
  struct stat info {};
  if (lstat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_) {
    unlink(path_.c_str());
  }
}

void UnixAcceptor::Start(Callback callback) {
  thread_ = std::thread([this, callback = std::move(callback)] { Run(callback); });
}

void UnixAcceptor::Stop() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    if (write(wakeup_.get(), &one, sizeof one) != sizeof one) {
      Log(LogLevel::kError, "acceptor_wakeup_failed", {{"errno", errno}});
    }
    thread_.join();
  }
  listener_.reset();
}

void UnixAcceptor::Run(const Callback& callback) {
  bool exhausted = false;
  for (;;) {
    pollfd fds[2] = {{wakeup_.get(), POLLIN, 0}, {listener_.get(), POLLIN, 0}};
    // Out of descriptors the listener stays readable: wait for the stop alone for a while.
    const int ready = poll(fds, exhausted ? 1 : 2, exhausted ? kExhaustedPauseMs : -1);
    if (ready < 0 && errno != EINTR) {
      Log(LogLevel::kError, "acceptor_failed", {{"address", path_}, {"errno", errno}});
      return;
    }
    if ((fds[0].revents & POLLIN) != 0) return;
    UniqueFd connection(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!connection.valid()) {
      const bool was_exhausted = std::exchange(
          exhausted, errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS);
      if (exhausted && !was_exhausted) {
        Log(LogLevel::kError, "out_of_descriptors", {{"address", path_}, {"errno", errno}});
      }
      continue;
    }
    exhausted = false;
    const absl::StatusOr<PeerCredentials> peer = GetPeerCredentials(connection.get());
    if (!peer.ok()) {
      Log(LogLevel::kWarning, "peer_unknown", {{"error", peer.status()}});
      continue;
    }
    callback(std::move(connection), *peer);
  }
}

}  // namespace wavekv
