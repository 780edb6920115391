// Lines to a descriptor that others may read slowly, or not at all.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace wavekv {

// A pipe takes so much whole or not at all, whoever else writes to it (PIPE_BUF).
inline constexpr size_t kLineBytesMax = 4096;

// write(2) that does not wait for a reader and raises no SIGPIPE on a socket; it allocates nothing.
// Returns how many bytes were taken, or -1 with errno; EAGAIN: there is no room now.
ssize_t WriteWithoutWaiting(int fd, absl::string_view bytes);

// Waits until `fd` has room for a line. False: the time is up.
bool WaitForRoom(int fd, std::chrono::milliseconds timeout);

// Writes lines whole or not at all. A line that a terminal, a socket or a full disk takes a part of
// is finished before another is begun. Not thread-safe.
class LineWriter {
 public:
  // `fd` is the caller's, and may be closed or become another file at any time.
  explicit LineWriter(int fd) : fd_(fd) {}

  // `line`: at most kLineBytesMax bytes, newline included. False: nothing of it was or will be
  // written.
  bool Write(absl::string_view line);

 private:
  bool WriteRest();

  const int fd_;
  std::string rest_;
};

}  // namespace wavekv
