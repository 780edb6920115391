// An exclusive lock on a path, held until its owner lets go or dies.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

// flock(2) on a file that names its holder. The file stays behind, empty, when the lock is
// released: removing it would let two starters lock two files of one name.
class FileLock {
 public:
  // Never waits. AlreadyExists: somebody holds it; the text names the holder's process id.
  static absl::StatusOr<FileLock> Acquire(const std::string& path);

  ~FileLock();
  FileLock(FileLock&&) noexcept = default;
  FileLock& operator=(FileLock&&) = delete;

 private:
  explicit FileLock(UniqueFd fd) : fd_(std::move(fd)) {}

  UniqueFd fd_;
};

}  // namespace wavekv
