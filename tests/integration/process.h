// Child processes of tests: started, listened to, signalled and ended by their own pid.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/mutex.h"
#include "storage/base/unique_fd.h"

namespace wavekv::integration {

struct ProcessOptions {
  std::vector<std::string> argv;  // argv[0] is the path of the program.
  std::optional<int> cpu;         // Bind to the n-th CPU this process may use, as taskset does.
};

// A running child. It is killed when this object goes, and by the kernel when the thread that
// started it goes, so that an aborted test leaves nothing behind. Thread-safe.
class Process {
 public:
  static absl::StatusOr<std::unique_ptr<Process>> Start(const ProcessOptions& options);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }

  // Waits until stdout and stderr together hold `text`. False when the time is up, or when the
  // child closed its output without having written it.
  bool WaitForOutput(absl::string_view text, std::chrono::milliseconds timeout);
  // What it has written: the first and the last 256 KiB.
  std::string Output() const;

  void Signal(int signal);
  // SIGSTOP, and waits until no thread of it runs any more.
  void Suspend();
  // Its exit code, or 128 + the signal that ended it; nothing when it still runs.
  std::optional<int> WaitForExit(std::chrono::milliseconds timeout);
  // SIGTERM, then SIGKILL when it does not go in time. Returns as WaitForExit.
  int Stop(std::chrono::milliseconds timeout = std::chrono::seconds(20));

 private:
  Process(pid_t pid, UniqueFd pidfd, UniqueFd output);
  void ReadOutput();

  const pid_t pid_;
  const UniqueFd pidfd_;
  const UniqueFd output_fd_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::string output_ ABSL_GUARDED_BY(mutex_);
  bool output_ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<int> exit_code_ ABSL_GUARDED_BY(mutex_);
  std::thread reader_;
};

// Threads of a process and its open descriptors, from /proc; 0 when it is gone.
int ThreadCount(pid_t pid);
int DescriptorCount(pid_t pid);
// Resident bytes, shared memory included.
uint64_t ResidentBytes(pid_t pid);

}  // namespace wavekv::integration
