// How many CPUs this process may really use.
#pragma once

#include <string>

namespace wavekv {

struct CpuLimits {
  int affinity_count = 1;  // CPUs in the affinity mask (taskset, cpuset).
  // CPUs' worth of time the tightest control group grants; 0: no quota.
  double quota_cpus = 0;
};

// `root` is "" outside tests; see FindCgroup.
CpuLimits ReadCpuLimits(const std::string& root);

// min(affinity, quota rounded up), at least 1: how many threads to run.
int UsableCpuCount();
int UsableCpuCount(const CpuLimits& limits);

}  // namespace wavekv
