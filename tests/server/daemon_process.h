// A real wavekvd, started by a test: bounded waits, ended by its process id.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "storage/base/unique_fd.h"

namespace wavekv {

inline constexpr std::chrono::seconds kProcessDeadline(60);

class DaemonProcess {
 public:
  // `in_child` runs between fork and exec: system calls only.
  explicit DaemonProcess(const std::vector<std::string>& flags,
                         const std::function<void()>& in_child = nullptr);
  ~DaemonProcess();  // Kills what is still there.
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // Reads its log until `text` has appeared. False: it ended, or the deadline passed.
  bool WaitFor(const std::string& text);
  bool WaitReady() { return WaitFor("event=ready"); }
  void Signal(int number) const;  // SIGSTOP: returns once it has stopped.
  // Waits for its end. The exit code; 128 and the signal's number when a signal ended it; -1: it
  // did not end before the deadline.
  int Wait();

  pid_t pid() const { return pid_; }
  // What it has written to stdout and stderr so far.
  const std::string& log() const { return log_; }
  // The value of `key` in the line of `event`; empty when there is none.
  std::string LogValue(const std::string& event, const std::string& key) const;

 private:
  // Reads some more; false at the end of the log or the deadline.
  bool ReadSome(std::chrono::steady_clock::time_point deadline);

  pid_t pid_ = -1;
  int exit_code_ = -1;
  bool ended_ = false;
  UniqueFd output_;
  std::string log_;
};

}  // namespace wavekv
