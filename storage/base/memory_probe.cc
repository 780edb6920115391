#include "storage/base/memory_probe.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "storage/base/bytes_text.h"
#include "storage/base/cgroup.h"

namespace wavekv {
namespace {

// A v1 group without a limit shows the largest page-aligned number; no machine has as much.
constexpr uint64_t kNoLimitBytes = 1ull << 62;

uint64_t KeyedKib(const std::string& text, absl::string_view key) {
  return FindKeyedNumber(text, key).value_or(0) * 1024;
}

// "[name]" among the words of a file like transparent_hugepage/shmem_enabled.
std::string BracketedWord(absl::string_view text) {
  const size_t open = text.find('[');
  const size_t close = text.find(']');
  if (open == text.npos || close == text.npos || close < open) return "";
  return std::string(text.substr(open + 1, close - open - 1));
}

// Members of a list like "0-3,8".
int CountOfRanges(absl::string_view text) {
  int count = 0;
  for (absl::string_view range : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(range, '-');
    int first = 0, last = 0;
    if (!absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last)) continue;
    if (last >= first) count += last - first + 1;
  }
  return count;
}

// The soft limit of "Max locked memory" in /proc/self/limits; nullopt: unlimited or unknown.
std::optional<uint64_t> MemlockLimit(const std::string& text) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    if (!absl::StartsWith(line, "Max locked memory")) continue;
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    uint64_t bytes = 0;
    if (words.size() > 3 && absl::SimpleAtoi(words[3], &bytes)) return bytes;
  }
  return std::nullopt;
}

struct GroupMemory {
  uint64_t limit_bytes = 0;
  std::string limit_file;
  uint64_t used_bytes = 0;  // What cannot simply be dropped.
};

// nullopt when the group has no limit.
std::optional<GroupMemory> ReadGroup(const std::string& directory, int version) {
  // memory.high does not kill, but throttles to a standstill what cannot be reclaimed, and a pool
  // cannot: so it is a limit like the other.
  const std::vector<const char*> limit_files =
      version == 1 ? std::vector<const char*>{"memory.limit_in_bytes"}
                   : std::vector<const char*>{"memory.max", "memory.high"};
  GroupMemory group;
  group.limit_bytes = kNoLimitBytes;
  for (const char* name : limit_files) {
    const std::string file = absl::StrCat(directory, "/", name);
    const uint64_t limit = ReadNumberFile(file).value_or(kNoLimitBytes);
    if (limit >= group.limit_bytes) continue;
    group.limit_bytes = limit;
    group.limit_file = file;
  }
  if (group.limit_file.empty()) return std::nullopt;
  const uint64_t usage =
      ReadNumberFile(
          absl::StrCat(directory, version == 1 ? "/memory.usage_in_bytes" : "/memory.current"))
          .value_or(0);
  const std::string stat = ReadSmallFile(directory + "/memory.stat").value_or("");
  const uint64_t reclaimable =
      FindKeyedNumber(stat, version == 1 ? "total_inactive_file" : "inactive_file").value_or(0);
  group.used_bytes = usage - std::min(usage, reclaimable);
  return group;
}

void ReadCgroupLimits(const std::string& root, MemoryReport* report) {
  const CgroupChain chain = FindCgroup(root, "memory");
  report->cgroup_version = chain.version;
  for (const std::string& directory : chain.directories) {
    const std::optional<GroupMemory> group = ReadGroup(directory, chain.version);
    if (!group.has_value()) continue;
    const uint64_t free = group->limit_bytes - std::min(group->limit_bytes, group->used_bytes);
    report->cgroup_free_bytes = std::min(report->cgroup_free_bytes.value_or(free), free);
    if (group->limit_bytes < report->cgroup_limit_bytes.value_or(kNoLimitBytes)) {
      report->cgroup_limit_bytes = group->limit_bytes;
      report->cgroup_limit_file = group->limit_file;
    }
  }
}

std::string LimitsText(const MemoryReport& report) {
  std::string text = absl::StrCat("the machine has ", BytesText(report.machine_available_bytes),
                                  " available of ", BytesText(report.machine_total_bytes));
  if (report.cgroup_limit_bytes.has_value()) {
    absl::StrAppend(&text, ", the control group has ", BytesText(*report.cgroup_free_bytes),
                    " free, its limit is ", BytesText(*report.cgroup_limit_bytes), " (",
                    report.cgroup_limit_file, ")");
  } else {
    absl::StrAppend(&text, ", and no control group limits it");
  }
  return text;
}

}  // namespace

MemoryReport ReadMemoryReport(const std::string& root) {
  MemoryReport report;
  const std::string meminfo = ReadSmallFile(root + "/proc/meminfo").value_or("");
  report.machine_total_bytes = KeyedKib(meminfo, "MemTotal:");
  report.machine_available_bytes = KeyedKib(meminfo, "MemAvailable:");
  report.huge_page_bytes = KeyedKib(meminfo, "Hugepagesize:");
  report.huge_pages_total = FindKeyedNumber(meminfo, "HugePages_Total:").value_or(0);
  report.huge_pages_free = FindKeyedNumber(meminfo, "HugePages_Free:").value_or(0);
  report.resident_bytes =
      KeyedKib(ReadSmallFile(root + "/proc/self/status").value_or(""), "VmRSS:");
  report.memlock_limit_bytes = MemlockLimit(ReadSmallFile(root + "/proc/self/limits").value_or(""));
  report.shmem_huge_pages = BracketedWord(
      ReadSmallFile(root + "/sys/kernel/mm/transparent_hugepage/shmem_enabled").value_or(""));
  report.numa_node_count = std::max(
      1, CountOfRanges(ReadSmallFile(root + "/sys/devices/system/node/online").value_or("")));
  ReadCgroupLimits(root, &report);
  return report;
}

uint64_t LargestPoolBytes(const MemoryReport& report) {
  const uint64_t free =
      std::min(report.machine_available_bytes, report.cgroup_free_bytes.value_or(kNoLimitBytes));
  return free - std::min(free, kDaemonHeadroomBytes);
}

absl::Status CheckPoolFits(const MemoryReport& report, uint64_t pool_bytes) {
  if (pool_bytes == 0) {
    return absl::InvalidArgumentError("--pool_bytes is 0, expected a size in bytes above 0");
  }
  const uint64_t largest = LargestPoolBytes(report);
  if (pool_bytes <= largest) return absl::OkStatus();
  const uint64_t ceiling =
      std::min(report.machine_total_bytes, report.cgroup_limit_bytes.value_or(kNoLimitBytes));
  const bool can_never_fit = pool_bytes > ceiling - std::min(ceiling, kDaemonHeadroomBytes);
  const std::string text = absl::StrCat(
      "a block pool of ", BytesText(pool_bytes), " and ", BytesText(kDaemonHeadroomBytes),
      " beside it do not fit: ", LimitsText(report), "; set --pool_bytes to at most ", largest,
      can_never_fit ? ", or raise the limit" : ", or free memory first");
  return can_never_fit ? absl::FailedPreconditionError(text) : absl::ResourceExhaustedError(text);
}

}  // namespace wavekv
