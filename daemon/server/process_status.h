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
  uint64_t huge_page_bytes = 0;         // Size of one; the host's reserved ones:
  uint64_t huge_pages_total = 0;
  uint64_t huge_pages_free = 0;
  std::string shmem_huge_pages;  // "never", "advise", ...: transparent ones for shared memory.
  uint32_t numa_node_count = 0;
};

// What cannot be read is 0.
ProcessStatus ReadProcessStatus();

}  // namespace wavekv
