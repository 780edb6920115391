#include "storage/base/cpuset.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "gtest/gtest.h"
#include "tests/storage/fake_root.h"

namespace wavekv {
namespace {

TEST(CpusetTest, QuotaIsTheTightestOfAllGroups) {
  struct Row {
    const char* why;
    const char* group_quota;
    const char* parent_quota;
    double expected;
  };
  const Row rows[] = {
      {"none", "max 100000\n", "max 100000\n", 0},
      {"own", "150000 100000\n", "max 100000\n", 1.5},
      {"the parent is tighter", "400000 100000\n", "50000 100000\n", 0.5},
      {"the parent is wider", "200000 100000\n", "800000 100000\n", 2},
      {"nonsense is no quota", "0 0\n", "x y\n", 0},
  };
  for (const Row& row : rows) {
    FakeRoot root;
    root.UseCgroupV2("/a/b");
    root.Write("/sys/fs/cgroup/a/b/cpu.max", row.group_quota);
    root.Write("/sys/fs/cgroup/a/cpu.max", row.parent_quota);
    EXPECT_DOUBLE_EQ(ReadCpuLimits(root.path()).quota_cpus, row.expected) << row.why;
  }
}

TEST(CpusetTest, VersionOneQuota) {
  FakeRoot root;
  root.UseCgroupV1("cpu", "/a");
  root.Write("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n");
  root.Write("/sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(ReadCpuLimits(root.path()).quota_cpus, 0);
  root.Write("/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "250000\n");
  EXPECT_DOUBLE_EQ(ReadCpuLimits(root.path()).quota_cpus, 2.5);
}

TEST(CpusetTest, CountIsTheSmallerOfMaskAndQuota) {
  EXPECT_EQ(UsableCpuCount({.affinity_count = 8, .quota_cpus = 0}), 8);
  EXPECT_EQ(UsableCpuCount({.affinity_count = 8, .quota_cpus = 2.5}), 3);
  EXPECT_EQ(UsableCpuCount({.affinity_count = 2, .quota_cpus = 16}), 2);
  EXPECT_EQ(UsableCpuCount({.affinity_count = 4, .quota_cpus = 0.1}), 1);
  EXPECT_GE(UsableCpuCount(), 1);
}

TEST(CpusetTest, FollowsTheAffinityMask) {
  std::thread narrow([] {
    cpu_set_t all, one;
    ASSERT_EQ(::sched_getaffinity(0, sizeof(all), &all), 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &all)) ++cpu;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    ASSERT_EQ(::sched_setaffinity(0, sizeof(one), &one), 0);  // Of this thread only.
    EXPECT_EQ(ReadCpuLimits("/nonexistent").affinity_count, 1);
    EXPECT_EQ(UsableCpuCount(), 1);
  });
  narrow.join();
}

}  // namespace
}  // namespace wavekv
