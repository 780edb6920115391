// What tests of a daemon's threads cannot hold it to.
#pragma once

#include <unistd.h>

#include <algorithm>

namespace wavekv {

// gRPC 1.51 sizes its pools by the CPUs of the machine, whatever a process may use of them: one
// event_engine, half a nexting_thread and up to two default-executors for each. With 2, 16 and 64
// CPUs a busy daemon on one of them had 13, 32 and 63 of its threads. So many more than with two.
inline int GrpcThreadsOfMoreCpus() {
  return static_cast<int>(7 * std::max(sysconf(_SC_NPROCESSORS_CONF) - 2, 0L) / 2);
}

}  // namespace wavekv
