#include "storage/base/file_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace wavekv {
namespace {

// What the holder wrote into the file; "unknown" while it has not yet.
std::string HolderPid(int fd) {
  char text[32];
  const ssize_t count = ::pread(fd, text, sizeof(text), 0);
  int pid = 0;
  if (count > 0 && absl::SimpleAtoi(absl::string_view(text, static_cast<size_t>(count)), &pid)) {
    return absl::StrCat(pid);
  }
  return "unknown";
}

// Whether `path` still names the file behind `fd`.
bool IsSameFile(int fd, const std::string& path) {
  struct stat by_fd, by_path;
  return ::fstat(fd, &by_fd) == 0 && ::stat(path.c_str(), &by_path) == 0 &&
         by_fd.st_dev == by_path.st_dev && by_fd.st_ino == by_path.st_ino;
}

}  // namespace

absl::StatusOr<FileLock> FileLock::Acquire(const std::string& path) {
  while (true) {
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd.valid()) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot open the lock file '", path, "'"));
    }
    if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EINTR) continue;
      if (errno != EWOULDBLOCK) {
        return absl::ErrnoToStatus(errno, absl::StrCat("cannot lock '", path, "'"));
      }
      return absl::AlreadyExistsError(absl::StrCat("'", path, "' is locked by process ",
                                                   HolderPid(fd.get()),
                                                   "; stop it or choose another path"));
    }
    if (!IsSameFile(fd.get(), path)) continue;  // Removed by hand meanwhile: lock the new one.
    const std::string pid = absl::StrCat(::getpid(), "\n");
    if (::ftruncate(fd.get(), 0) != 0 ||
        ::pwrite(fd.get(), pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot write the lock file '", path, "'"));
    }
    return FileLock(std::move(fd));
  }
}

FileLock::~FileLock() {
  // Empty, so that no later reader takes a dead process for the holder. If it fails, the lock is
  // free all the same.
  if (fd_.valid() && ::ftruncate(fd_.get(), 0) != 0) return;
}

}  // namespace wavekv
