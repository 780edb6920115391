// A pipe that nobody reads, but for a test that wants to see what went in.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <string>

#include "storage/base/check.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

// Holds 4096 bytes. Both ends wait, as those of a shell do.
class UnreadPipe {
 public:
  static constexpr size_t kBytes = 4096;

  UnreadPipe() {
    int ends[2];
    WAVEKV_CHECK(pipe2(ends, O_CLOEXEC) == 0, "no pipe");
    read_end_.reset(ends[0]);
    write_end_.reset(ends[1]);
    WAVEKV_CHECK(fcntl(ends[1], F_SETPIPE_SZ, kBytes) == kBytes, "a pipe of another size");
  }

  int read_end() const { return read_end_.get(); }
  int write_end() const { return write_end_.get(); }
  void CloseReadEnd() { read_end_.reset(); }

  // Puts in what there is room for in an empty pipe, or all but `spare` bytes.
  void Fill(size_t spare = 0) {
    const std::string bytes = Filling(spare);
    WAVEKV_CHECK(
        write(write_end(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()),
        "a pipe that was not empty");
  }
  static std::string Filling(size_t spare = 0) {
    return std::string(kBytes - spare - 1, 'x') + "\n";
  }

  // Takes what is in it.
  std::string Drain() { return Drain(read_end()); }
  // The same with any other descriptor.
  static std::string Drain(int fd) {
    std::string text;
    char bytes[kBytes];
    for (pollfd ready = {fd, POLLIN, 0}; poll(&ready, 1, 0) > 0;) {
      const ssize_t count = read(fd, bytes, sizeof(bytes));
      if (count <= 0) break;
      text.append(bytes, static_cast<size_t>(count));
    }
    return text;
  }

 private:
  UniqueFd read_end_;
  UniqueFd write_end_;
};

// stderr is `fd` while it lives.
class StderrTo {
 public:
  explicit StderrTo(int fd) : before_(fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 3)) {
    WAVEKV_CHECK(dup2(fd, STDERR_FILENO) == STDERR_FILENO, "no stderr");
  }
  ~StderrTo() { dup2(before_.get(), STDERR_FILENO); }
  StderrTo(const StderrTo&) = delete;
  StderrTo& operator=(const StderrTo&) = delete;

 private:
  const UniqueFd before_;
};

}  // namespace wavekv
