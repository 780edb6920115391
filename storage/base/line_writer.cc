#include "storage/base/line_writer.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>

#include "storage/base/check.h"
#include "storage/base/unique_fd.h"

namespace wavekv {
namespace {

static_assert(kLineBytesMax == PIPE_BUF);

// The same file with flags of its own: O_NONBLOCK on `fd` would change it for every process that
// has it from the same shell. Invalid where /proc is missing, where the file is another user's, or
// when there is no descriptor left.
UniqueFd OpenWithoutBlocking(int fd) {
  char path[32];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
  return UniqueFd(::open(path, O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
}

}  // namespace

ssize_t WriteWithoutWaiting(int fd, absl::string_view bytes) {
  struct stat about {};
  if (::fstat(fd, &about) != 0) return -1;
  if (S_ISSOCK(about.st_mode)) {
    return ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  // Other files have no readers to wait for.
  if (!S_ISFIFO(about.st_mode) && ::isatty(fd) == 0) {
    return ::write(fd, bytes.data(), bytes.size());
  }
  const UniqueFd own = OpenWithoutBlocking(fd);
  if (own.valid()) return ::write(own.get(), bytes.data(), bytes.size());
  // The second call can still wait: when another process fills the pipe between the two, or when a
  // terminal has room, but not for all of a long line.
  if (!WaitForRoom(fd, std::chrono::milliseconds(0))) {
    errno = EAGAIN;
    return -1;
  }
  return ::write(fd, bytes.data(), bytes.size());
}

bool WaitForRoom(int fd, std::chrono::milliseconds timeout) {
  pollfd room = {fd, POLLOUT, 0};
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  int ready;
  do {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    ready = ::poll(&room, 1, std::max(0, static_cast<int>(left.count())));
  } while (ready < 0 && errno == EINTR);
  // A descriptor that is closed, or whose reader is gone, keeps nobody waiting.
  return ready > 0;
}

bool LineWriter::Write(absl::string_view line) {
  WAVEKV_CHECK(line.size() <= kLineBytesMax, "a line that a pipe could tear");
  if (!WriteRest()) return false;
  const ssize_t count = WriteWithoutWaiting(fd_, line);
  if (count <= 0) return false;
  rest_.assign(line.data() + count, line.size() - static_cast<size_t>(count));
  WriteRest();
  return true;
}

bool LineWriter::WriteRest() {
  while (!rest_.empty()) {
    const ssize_t count = WriteWithoutWaiting(fd_, rest_);
    if (count <= 0) return false;
    rest_.erase(0, static_cast<size_t>(count));
  }
  return true;
}

}  // namespace wavekv
