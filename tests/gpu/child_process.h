// Programs that a test starts: bounded waits, and an end by process id.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/base/unique_fd.h"
#include "tests/temp_dir.h"

namespace wavekv {

inline constexpr auto kWait = std::chrono::seconds(60);  // For what should take milliseconds.

// A program with its stdout and stderr read through one pipe. Killed when destroyed.
class ChildProcess {
 public:
  explicit ChildProcess(const std::vector<std::string>& arguments);
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // Reads output until a line contains `text`, and returns that line; empty when the program ended
  // or kWait passed first.
  std::string WaitForLine(const std::string& text);
  // Returns once it has stopped when `signal` is SIGSTOP.
  void Signal(int signal) const;
  // Waits for the end. The exit status, or minus the signal that ended it; -1000: it did not end.
  int WaitForExit();
  // SIGKILL, and waits.
  void Kill();

  pid_t pid() const { return pid_; }
  const std::string& output() const { return output_; }

 private:
  bool ReadMore(std::chrono::steady_clock::time_point deadline);

  pid_t pid_ = -1;
  UniqueFd pipe_;
  bool ended_ = false;
  int exit_ = -1000;
  std::string output_;
  size_t consumed_ = 0;
};

// Calls `condition` until it is true; false when kWait passed first.
template <class Condition>
bool WaitUntil(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kWait;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

// A wavebufferd on a socket of its own, ready to be used.
class WavebufferdProcess {
 public:
  explicit WavebufferdProcess(const std::string& directory,
                              const std::vector<std::string>& flags = {});
  bool ready() const { return ready_; }
  ChildProcess& process() { return process_; }
  std::string address() const { return "unix:" + socket_; }
  std::string descriptor_socket() const { return socket_ + ".fd"; }

 private:
  const std::string socket_;
  ChildProcess process_;
  const bool ready_;
};

}  // namespace wavekv
