// A daemon's threads: its own, which have a bound, and gRPC's, which the machine decides.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "absl/strings/str_cat.h"

namespace wavekv {

// gRPC 1.51 sizes its pools by the CPUs of the machine, whatever a process may use of them: one
// event_engine, half a nexting_thread and up to two default-executors for each. With 2, 16 and 64
// CPUs a busy daemon on one of them had 13, 32 and 63 of its threads. So many more than with two.
inline int GrpcThreadsOfMoreCpus() {
  return static_cast<int>(7 * std::max(sysconf(_SC_NPROCESSORS_CONF) - 2, 0L) / 2);
}

// Threads of a process that wavekv's code has named. 0 when it is gone.
inline int OwnThreadCount(pid_t pid) {
  int count = 0;
  std::error_code error;
  const std::filesystem::directory_iterator tasks(absl::StrCat("/proc/", pid, "/task"), error);
  if (error) return 0;
  for (const auto& task : tasks) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm"), name);
    count += name.starts_with("wavekv") ? 1 : 0;
  }
  return count;
}

}  // namespace wavekv
