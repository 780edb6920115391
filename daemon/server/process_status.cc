#include "daemon/server/process_status.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "storage/base/cgroup.h"
#include "storage/base/memory_probe.h"

namespace wavekv {

ProcessStatus ReadProcessStatus() {
  const MemoryReport memory = ReadMemoryReport();
  ProcessStatus process;
  process.rss_bytes = memory.resident_bytes;
  process.memory_available_bytes =
      std::min(memory.machine_available_bytes,
               memory.cgroup_free_bytes.value_or(std::numeric_limits<uint64_t>::max()));
  process.cgroup_limit_bytes = memory.cgroup_limit_bytes.value_or(0);
  process.memlock_limit_bytes =
      memory.memlock_limit_bytes.value_or(std::numeric_limits<uint64_t>::max());
  process.cgroup_version =
      memory.cgroup_version == 0 ? "none" : absl::StrCat("v", memory.cgroup_version);
  process.huge_page_bytes = memory.huge_page_bytes;
  process.huge_pages_total = memory.huge_pages_total;
  process.huge_pages_free = memory.huge_pages_free;
  process.shmem_huge_pages = memory.shmem_huge_pages;
  process.numa_node_count = static_cast<uint32_t>(memory.numa_node_count);
  if (const std::optional<std::string> text = ReadSmallFile("/proc/self/status")) {
    const std::string spaced = absl::StrReplaceAll(*text, {{"\t", " "}});
    process.thread_count = static_cast<uint32_t>(FindKeyedNumber(spaced, "Threads:").value_or(0));
  }
  return process;
}

}  // namespace wavekv
