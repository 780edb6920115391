#include "storage/base/fd_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

using Deadline = std::chrono::steady_clock::time_point;

constexpr int kBacklog = 128;
constexpr int kSoPeerPidFd = 77;  // SO_PEERPIDFD, Linux 6.5; newer than Debian 12's headers.
// Room for more descriptors than allowed, so that a sender of two is told from a truncated one;
// the kernel closes what does not fit.
constexpr int kReceivedFdsMax = 8;

Deadline DeadlineAfter(std::chrono::milliseconds timeout) {
  return std::chrono::steady_clock::now() + timeout;
}

// Waits until `fd` is ready for `events` or has an error, which the next call on it reports.
absl::Status PollUntil(int fd, short events, Deadline deadline, absl::string_view what) {
  while (true) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    pollfd entry{fd, events, 0};
    const int left_ms = static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1 << 30));
    const int ready = ::poll(&entry, 1, left_ms);
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return absl::ErrnoToStatus(errno, "poll");
    if (ready == 0) {
      return absl::DeadlineExceededError(absl::StrCat("UNIX socket: time is up, ", what));
    }
  }
}

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("UNIX socket path '", path, "' has ",
                                                   path.size(), " bytes, expected 1 to ",
                                                   sizeof(address.sun_path) - 1));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

absl::StatusOr<UniqueFd> NewSocket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "cannot create a UNIX socket");
  return fd;
}

absl::Status PeerGone(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("UNIX socket: the peer is gone, ", what));
}

// Removes a socket file that nobody listens on.
absl::Status RemoveStaleSocket(const std::string& path, const sockaddr_un& address) {
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot look at '", path, "'"));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::AlreadyExistsError(
        absl::StrCat("'", path, "' exists and is no socket; remove it or choose another path"));
  }
  // A socket of another type refuses with EPROTOTYPE: alive too.
  WAVEKV_ASSIGN_OR_RETURN(UniqueFd probe, NewSocket());
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
      errno != ECONNREFUSED) {
    return absl::AlreadyExistsError(
        absl::StrCat("another process listens on '", path, "'; stop it or choose another path"));
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot remove the stale socket '", path, "'"));
  }
  return absl::OkStatus();
}

// Takes ownership of every descriptor in a received message.
std::vector<UniqueFd> TakeFds(msghdr* message) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(message); part != nullptr; part = CMSG_NXTHDR(message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

}  // namespace

absl::StatusOr<PeerCredentials> GetPeerCredentials(int socket_fd) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (::getsockopt(socket_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) {
    return absl::ErrnoToStatus(errno, "cannot read the peer's credentials");
  }
  return PeerCredentials{credentials.pid, credentials.uid, credentials.gid};
}

UniqueFd PeerProcess(int socket_fd, const PeerCredentials& peer) {
  int fd = -1;
  socklen_t bytes = sizeof(fd);
  if (::getsockopt(socket_fd, SOL_SOCKET, kSoPeerPidFd, &fd, &bytes) == 0) return UniqueFd(fd);
  if (peer.pid <= 0) return UniqueFd();
  UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
  // A process closes its sockets before its id is free for another one: a peer that has not hung
  // up by now is the process that we opened.
  pollfd entry{socket_fd, 0, 0};
  if (::poll(&entry, 1, 0) == 1 && (entry.revents & (POLLHUP | POLLERR)) != 0) return UniqueFd();
  return process;
}

absl::StatusOr<FdSocket> FdSocket::Connect(const std::string& path,
                                           std::chrono::milliseconds timeout) {
  WAVEKV_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  WAVEKV_ASSIGN_OR_RETURN(UniqueFd fd, NewSocket());
  // A UNIX connect waits only for room in the backlog, for as long as SO_SNDTIMEO says.
  const int64_t wait_us =
      std::max<int64_t>(std::chrono::duration_cast<std::chrono::microseconds>(timeout).count(), 1);
  const timeval wait{static_cast<time_t>(wait_us / 1000000),
                     static_cast<suseconds_t>(wait_us % 1000000)};
  if (::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait)) != 0) {
    return absl::ErrnoToStatus(errno, "cannot set the connect time limit");
  }
  int result;
  do {
    result = ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return FdSocket(std::move(fd));
  const std::string what = absl::StrCat("cannot connect to '", path, "'");
  if (errno == EAGAIN) {
    return absl::DeadlineExceededError(absl::StrCat(what, " within ", timeout.count(), " ms"));
  }
  if (errno == ECONNREFUSED) return absl::UnavailableError(absl::StrCat(what, ": nobody listens"));
  return absl::ErrnoToStatus(errno, what);
}

absl::StatusOr<std::pair<FdSocket, FdSocket>> FdSocket::Pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) != 0) {
    return absl::ErrnoToStatus(errno, "cannot create a socket pair");
  }
  return std::make_pair(FdSocket(UniqueFd(fds[0])), FdSocket(UniqueFd(fds[1])));
}

absl::Status FdSocket::Send(absl::string_view bytes, int fd, std::chrono::milliseconds timeout) {
  if (bytes.empty() || bytes.size() > kFdMessageBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("message of ", bytes.size(), " bytes, expected 1 to ", kFdMessageBytesMax));
  }
  iovec payload{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &payload;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &fd, sizeof(int));
  }
  const Deadline deadline = DeadlineAfter(timeout);
  while (::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) return PeerGone("message not sent");
    if (errno != EAGAIN) return absl::ErrnoToStatus(errno, "cannot send on a UNIX socket");
    WAVEKV_RETURN_IF_ERROR(PollUntil(fd_.get(), POLLOUT, deadline, "the peer does not read"));
  }
  return absl::OkStatus();
}

absl::StatusOr<FdMessage> FdSocket::Receive(size_t bytes_max, std::chrono::milliseconds timeout) {
  FdMessage result;
  result.bytes.resize(std::min(bytes_max, kFdMessageBytesMax));
  iovec payload{result.bytes.data(), result.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kReceivedFdsMax * sizeof(int))];
  msghdr message{};
  const Deadline deadline = DeadlineAfter(timeout);
  ssize_t received;
  while (true) {
    message = {};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    received = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received >= 0) break;
    if (errno == EINTR) continue;
    if (errno == ECONNRESET) return PeerGone("nothing received");
    if (errno != EAGAIN) return absl::ErrnoToStatus(errno, "cannot receive on a UNIX socket");
    WAVEKV_RETURN_IF_ERROR(PollUntil(fd_.get(), POLLIN, deadline, "the peer sent nothing"));
  }
  std::vector<UniqueFd> fds = TakeFds(&message);  // Owned, so closed on every way out.
  if ((message.msg_flags & MSG_TRUNC) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer sent a message of more than ", payload.iov_len, " bytes"));
  }
  if (fds.size() > 1 || (message.msg_flags & MSG_CTRUNC) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("peer sent ", fds.size(), " or more descriptors, expected at most 1"));
  }
  if (received == 0) return PeerGone("nothing received");  // We send no empty messages.
  result.bytes.resize(static_cast<size_t>(received));
  if (!fds.empty()) result.fd = std::move(fds.front());
  return result;
}

absl::StatusOr<FdListener> FdListener::Listen(const std::string& path, mode_t mode) {
  WAVEKV_ASSIGN_OR_RETURN(const sockaddr_un address, AddressOf(path));
  WAVEKV_RETURN_IF_ERROR(RemoveStaleSocket(path, address));
  WAVEKV_ASSIGN_OR_RETURN(UniqueFd fd, NewSocket());
  // bind(2) gives the file the socket's own mode less the umask. Set it here, and no instant
  // exists in which others could connect; umask(2) would do it for all threads at once.
  if (::fchmod(fd.get(), mode) != 0) {
    return absl::ErrnoToStatus(errno, "cannot set the mode of a UNIX socket");
  }
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot bind '", path, "'"));
  }
  struct stat info;
  if (::lstat(path.c_str(), &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot look at '", path, "'"));
  }
  FdListener listener(std::move(fd), path, info.st_dev, info.st_ino);
  if (::listen(listener.fd(), kBacklog) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot listen on '", path, "'"));
  }
  return listener;
}

FdListener::~FdListener() {
  if (!fd_.valid()) return;  // Moved from.
  struct stat info;
  if (::lstat(path_.c_str(), &info) == 0 && info.st_dev == device_ && info.st_ino == inode_) {
    ::unlink(path_.c_str());
  }
}

absl::StatusOr<FdSocket> FdListener::Accept(std::chrono::milliseconds timeout) {
  const Deadline deadline = DeadlineAfter(timeout);
  while (true) {
    WAVEKV_RETURN_IF_ERROR(PollUntil(fd_.get(), POLLIN, deadline, "nobody connected"));
    UniqueFd peer(::accept4(fd_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (peer.valid()) return FdSocket(std::move(peer));
    if (errno != EINTR && errno != EAGAIN && errno != ECONNABORTED) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot accept on '", path_, "'"));
    }
  }
}

}  // namespace wavekv
