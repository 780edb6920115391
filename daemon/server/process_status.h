// What the kernel says about this process and its memory.
#pragma once

#include <cstdint>
#include <string>

namespace wavekv {

struct ProcessStatus {
  uint64_t rss_bytes = 0;
  uint32_t thread_count = 0;
  uint64_t memory_available_bytes = 0;  // Of the host and of the control group: the tighter one.
  uint64_t cgroup_limit_bytes = 0;      // 0: none.
  uint64_t memlock_limit_bytes = 0;     // UINT64_MAX: unlimited.
  std::string cgroup_version;           // "v1", "v2" or "none"
};

// What cannot be read is 0.
ProcessStatus ReadProcessStatus();

}  // namespace wavekv
