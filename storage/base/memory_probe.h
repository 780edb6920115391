// What memory this process may use, and whether a pool fits into it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"

namespace wavekv {

// What the daemon needs beside its pool: code, stacks, requests under way, clustering.
inline constexpr uint64_t kDaemonHeadroomBytes = 128ull << 20;

// All figures are of the moment of reading; 0 or nullopt where the kernel does not say.
struct MemoryReport {
  uint64_t machine_total_bytes = 0;
  uint64_t machine_available_bytes = 0;  // MemAvailable: without swapping.

  // The tightest limit among this process's control group and all its ancestors.
  int cgroup_version = 0;                      // 1, 2, or 0: no memory controller.
  std::optional<uint64_t> cgroup_limit_bytes;  // nullopt: none of them has a limit.
  std::string cgroup_limit_file;               // Where that limit is set.
  // Least room left under any of these limits. File cache that is not in use counts as room.
  // memfds and shared memory count as used: they can be swapped at best.
  std::optional<uint64_t> cgroup_free_bytes;

  std::optional<uint64_t> memlock_limit_bytes;  // nullopt: unlimited.
  uint64_t resident_bytes = 0;                  // Of this process.
  uint64_t huge_page_bytes = 0;                 // Size of one; the reserved ones:
  uint64_t huge_pages_total = 0;
  uint64_t huge_pages_free = 0;
  std::string shmem_huge_pages;  // "never", "advise", ...: transparent ones for memfds.
  int numa_node_count = 1;
};

// Reads /proc and /sys below `root`, which is "" outside tests.
MemoryReport ReadMemoryReport(const std::string& root = "");

// The largest pool that fits now, headroom left aside; 0 when there is room for none.
uint64_t LargestPoolBytes(const MemoryReport& report);

// OK when a pool of `pool_bytes` plus the headroom can be filled without swapping and without
// meeting the OOM killer. FailedPrecondition: the machine or a control group is too small for it
// at any time. ResourceExhausted: too little is free now. The text names both limits and the cure.
absl::Status CheckPoolFits(const MemoryReport& report, uint64_t pool_bytes);

}  // namespace wavekv
