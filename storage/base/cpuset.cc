#include "storage/base/cpuset.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "storage/base/cgroup.h"

namespace wavekv {
namespace {

int AffinityCount() {
  // The mask of a machine with many CPUs is larger than cpu_set_t; grow until it fits.
  for (int cpus = 1024; cpus <= 1 << 20; cpus *= 2) {
    std::vector<cpu_set_t> mask(CPU_ALLOC_SIZE(cpus) / sizeof(cpu_set_t) + 1);
    const size_t bytes = mask.size() * sizeof(cpu_set_t);
    if (::sched_getaffinity(0, bytes, mask.data()) == 0) {
      return std::max(1, CPU_COUNT_S(bytes, mask.data()));
    }
  }
  return 1;
}

// CPUs of quota in one group's directory; 0: none.
double QuotaCpus(const std::string& directory, int version) {
  double quota = 0, period = 0;
  if (version == 2) {
    const std::optional<std::string> text = ReadSmallFile(directory + "/cpu.max");
    if (!text.has_value()) return 0;
    const std::vector<std::string> words = absl::StrSplit(*text, absl::ByAnyChar(" \n"));
    if (words.size() < 2 || !absl::SimpleAtod(words[0], &quota) ||
        !absl::SimpleAtod(words[1], &period)) {
      return 0;  // "max 100000"
    }
  } else {
    // -1 without a quota, which is no unsigned number.
    const std::optional<uint64_t> quota_us = ReadNumberFile(directory + "/cpu.cfs_quota_us");
    const std::optional<uint64_t> period_us = ReadNumberFile(directory + "/cpu.cfs_period_us");
    if (!quota_us.has_value() || !period_us.has_value()) return 0;
    quota = static_cast<double>(*quota_us);
    period = static_cast<double>(*period_us);
  }
  return std::isfinite(quota) && quota > 0 && period > 0 ? quota / period : 0;
}

}  // namespace

CpuLimits ReadCpuLimits(const std::string& root) {
  CpuLimits limits;
  limits.affinity_count = AffinityCount();
  const CgroupChain chain = FindCgroup(root, "cpu");
  for (const std::string& directory : chain.directories) {
    const double cpus = QuotaCpus(directory, chain.version);
    if (cpus > 0 && (limits.quota_cpus == 0 || cpus < limits.quota_cpus)) limits.quota_cpus = cpus;
  }
  return limits;
}

int UsableCpuCount(const CpuLimits& limits) {
  int count = limits.affinity_count;
  if (limits.quota_cpus > 0 && limits.quota_cpus < count) {
    count = static_cast<int>(std::ceil(limits.quota_cpus));
  }
  return std::max(1, count);
}

int UsableCpuCount() { return UsableCpuCount(ReadCpuLimits("")); }

}  // namespace wavekv
