#include "storage/base/memory_probe.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/shared_memory.h"
#include "tests/storage/fake_root.h"
#include "tests/storage/real_cgroup.h"

namespace wavekv {
namespace {

using testing::HasSubstr;

constexpr uint64_t kMiB = 1ull << 20;
constexpr uint64_t kGiB = 1ull << 30;

void WriteMachine(FakeRoot* root, uint64_t total_bytes, uint64_t available_bytes) {
  root->Write("/proc/meminfo",
              absl::StrCat("MemTotal:       ", total_bytes / 1024, " kB\n",
                           "MemFree:        1 kB\n", "MemAvailable:   ", available_bytes / 1024,
                           " kB\n", "HugePages_Total:      12\nHugePages_Free:        5\n",
                           "Hugepagesize:       2048 kB\n"));
}

void WriteV1Group(FakeRoot* root, const std::string& group, const std::string& limit,
                  uint64_t usage, uint64_t inactive_file) {
  const std::string directory = "/sys/fs/cgroup/memory" + group;
  root->Write(directory + "/memory.limit_in_bytes", limit + "\n");
  root->Write(directory + "/memory.usage_in_bytes", absl::StrCat(usage, "\n"));
  root->Write(directory + "/memory.stat",
              absl::StrCat("cache 5\ninactive_file 1\ntotal_inactive_file ", inactive_file, "\n"));
}

TEST(MemoryProbeTest, ReadsTheMachine) {
  FakeRoot root;
  WriteMachine(&root, 16 * kGiB, 9 * kGiB);
  root.Write("/proc/self/status", "Name:\tx\nVmRSS:\t    2048 kB\n");
  root.Write("/proc/self/limits",
             "Limit                     Soft Limit           Hard Limit           Units     \n"
             "Max cpu time              unlimited            unlimited            seconds   \n"
             "Max locked memory         65536                65536                bytes     \n");
  root.Write("/sys/kernel/mm/transparent_hugepage/shmem_enabled",
             "always within_size advise [never] deny force\n");
  root.Write("/sys/devices/system/node/online", "0-1,3\n");
  const MemoryReport report = ReadMemoryReport(root.path());
  EXPECT_EQ(report.machine_total_bytes, 16 * kGiB);
  EXPECT_EQ(report.machine_available_bytes, 9 * kGiB);
  EXPECT_EQ(report.resident_bytes, 2 * kMiB);
  EXPECT_EQ(report.memlock_limit_bytes, 65536u);
  EXPECT_EQ(report.huge_page_bytes, 2 * kMiB);
  EXPECT_EQ(report.huge_pages_total, 12u);
  EXPECT_EQ(report.huge_pages_free, 5u);
  EXPECT_EQ(report.shmem_huge_pages, "never");
  EXPECT_EQ(report.numa_node_count, 3);
  EXPECT_EQ(report.cgroup_version, 0);
  EXPECT_EQ(report.cgroup_limit_bytes, std::nullopt);
}

TEST(MemoryProbeTest, UnlimitedMemlockAndMissingFiles) {
  FakeRoot root;
  root.Write("/proc/self/limits", "Max locked memory  unlimited  unlimited  bytes\n");
  const MemoryReport report = ReadMemoryReport(root.path());
  EXPECT_EQ(report.memlock_limit_bytes, std::nullopt);
  EXPECT_EQ(report.numa_node_count, 1);
  EXPECT_EQ(report.shmem_huge_pages, "");
  EXPECT_EQ(LargestPoolBytes(report), 0u) << "a machine that says nothing promises nothing";
}

TEST(MemoryProbeTest, VersionOneTakesTheTightestAncestor) {
  FakeRoot root;
  WriteMachine(&root, 16 * kGiB, 9 * kGiB);
  root.UseCgroupV1("memory", "/pods/a");
  WriteV1Group(&root, "", "9223372036854771712", 10 * kGiB, 0);
  WriteV1Group(&root, "/pods", absl::StrCat(2 * kGiB), 1900 * kMiB, 100 * kMiB);
  WriteV1Group(&root, "/pods/a", absl::StrCat(4 * kGiB), 1 * kGiB, 0);
  const MemoryReport report = ReadMemoryReport(root.path());
  EXPECT_EQ(report.cgroup_version, 1);
  EXPECT_EQ(report.cgroup_limit_bytes, 2 * kGiB);
  EXPECT_EQ(report.cgroup_limit_file,
            root.path() + "/sys/fs/cgroup/memory/pods/memory.limit_in_bytes");
  EXPECT_EQ(report.cgroup_free_bytes, 248 * kMiB) << "idle file cache counts as room";
}

TEST(MemoryProbeTest, LeastRoomMayBeUnderAnotherLimitThanTheSmallest) {
  FakeRoot root;
  WriteMachine(&root, 16 * kGiB, 9 * kGiB);
  root.UseCgroupV1("memory", "/full/small");
  WriteV1Group(&root, "/full", absl::StrCat(8 * kGiB), 8 * kGiB - kMiB, 0);
  WriteV1Group(&root, "/full/small", absl::StrCat(kGiB), 0, 0);
  const MemoryReport report = ReadMemoryReport(root.path());
  EXPECT_EQ(report.cgroup_limit_bytes, kGiB);
  EXPECT_EQ(report.cgroup_free_bytes, kMiB);
}

TEST(MemoryProbeTest, UnlimitedVersionOneGroupHasNoLimit) {
  FakeRoot root;
  WriteMachine(&root, 16 * kGiB, 9 * kGiB);
  root.UseCgroupV1("memory", "/");
  WriteV1Group(&root, "", "9223372036854771712", 10 * kGiB, 0);
  const MemoryReport report = ReadMemoryReport(root.path());
  EXPECT_EQ(report.cgroup_limit_bytes, std::nullopt);
  EXPECT_EQ(LargestPoolBytes(report), 9 * kGiB - kDaemonHeadroomBytes);
}

TEST(MemoryProbeTest, VersionTwoHonoursMaxAndHigh) {
  struct Row {
    const char* why;
    std::string max, high;
    std::optional<uint64_t> limit;
    const char* file;
  };
  const Row rows[] = {
      {"neither", "max", "max", std::nullopt, ""},
      {"max alone", absl::StrCat(kGiB), "max", kGiB, "memory.max"},
      {"high throttles before max kills", absl::StrCat(kGiB), absl::StrCat(kGiB / 2), kGiB / 2,
       "memory.high"},
  };
  for (const Row& row : rows) {
    FakeRoot root;
    WriteMachine(&root, 16 * kGiB, 9 * kGiB);
    root.UseCgroupV2("/a");
    const std::string directory = "/sys/fs/cgroup/a";
    root.Write(directory + "/memory.max", row.max + "\n");
    root.Write(directory + "/memory.high", row.high + "\n");
    root.Write(directory + "/memory.current", absl::StrCat(100 * kMiB, "\n"));
    root.Write(directory + "/memory.stat", absl::StrCat("anon 1\ninactive_file ", 40 * kMiB));
    const MemoryReport report = ReadMemoryReport(root.path());
    EXPECT_EQ(report.cgroup_version, 2) << row.why;
    EXPECT_EQ(report.cgroup_limit_bytes, row.limit) << row.why;
    EXPECT_THAT(report.cgroup_limit_file, testing::EndsWith(row.file)) << row.why;
    if (row.limit.has_value()) {
      EXPECT_EQ(report.cgroup_free_bytes, *row.limit - 60 * kMiB) << row.why;
    }
  }
}

// FAULTS row 28.
TEST(MemoryProbeTest, PoolsThatDoNotFitAreRefusedWithTheCure) {
  struct Row {
    const char* why;
    uint64_t total, available;
    std::optional<uint64_t> limit, free;
    uint64_t pool;
    absl::StatusCode code;
  };
  const Row rows[] = {
      {"fits", 16 * kGiB, 8 * kGiB, {}, {}, 4 * kGiB, absl::StatusCode::kOk},
      {"fits to the byte",
       16 * kGiB,
       8 * kGiB,
       {},
       {},
       8 * kGiB - kDaemonHeadroomBytes,
       absl::StatusCode::kOk},
      {"one byte more",
       16 * kGiB,
       8 * kGiB,
       {},
       {},
       8 * kGiB - kDaemonHeadroomBytes + 1,
       absl::StatusCode::kResourceExhausted},
      {"less free than asked",
       16 * kGiB,
       512 * kMiB,
       {},
       {},
       kGiB,
       absl::StatusCode::kResourceExhausted},
      {"more than the machine",
       16 * kGiB,
       15 * kGiB,
       {},
       {},
       17 * kGiB,
       absl::StatusCode::kFailedPrecondition},
      {"cgroup of 512 MiB, pool of 1 GiB", 16 * kGiB, 8 * kGiB, 512 * kMiB, 500 * kMiB, kGiB,
       absl::StatusCode::kFailedPrecondition},
      {"pool as large as the cgroup", 16 * kGiB, 8 * kGiB, 512 * kMiB, 512 * kMiB, 512 * kMiB,
       absl::StatusCode::kFailedPrecondition},
      {"cgroup large enough, but used", 16 * kGiB, 8 * kGiB, 4 * kGiB, 600 * kMiB, kGiB,
       absl::StatusCode::kResourceExhausted},
      {"cgroup smaller than the headroom", 16 * kGiB, 8 * kGiB, 64 * kMiB, 64 * kMiB, 1,
       absl::StatusCode::kFailedPrecondition},
      {"the largest number",
       16 * kGiB,
       8 * kGiB,
       {},
       {},
       ~0ull,
       absl::StatusCode::kFailedPrecondition},
      {"nothing", 16 * kGiB, 8 * kGiB, {}, {}, 0, absl::StatusCode::kInvalidArgument},
  };
  for (const Row& row : rows) {
    MemoryReport report;
    report.machine_total_bytes = row.total;
    report.machine_available_bytes = row.available;
    report.cgroup_limit_bytes = row.limit;
    report.cgroup_free_bytes = row.free;
    report.cgroup_limit_file = "/sys/fs/cgroup/x/memory.max";
    const absl::Status status = CheckPoolFits(report, row.pool);
    EXPECT_EQ(status.code(), row.code) << row.why << ": " << status;
    if (status.ok()) continue;
    const std::string text(status.message());
    EXPECT_THAT(text, HasSubstr("--pool_bytes")) << row.why;
    if (row.pool == 0) continue;
    EXPECT_THAT(text, HasSubstr(absl::StrCat(row.available, " bytes) available"))) << row.why;
    EXPECT_THAT(text, HasSubstr(absl::StrCat("at most ", LargestPoolBytes(report)))) << row.why;
    if (row.limit.has_value()) {
      EXPECT_THAT(text, HasSubstr(absl::StrCat(*row.limit, " bytes) (/sys/fs/cgroup/x/memory.max")))
          << row.why;
    }
  }
}

TEST(MemoryProbeTest, ReadsThisMachine) {
  const MemoryReport report = ReadMemoryReport();
  EXPECT_GT(report.machine_total_bytes, 64 * kMiB);
  EXPECT_GT(report.machine_available_bytes, 0u);
  EXPECT_LE(report.machine_available_bytes, report.machine_total_bytes);
  EXPECT_GT(report.resident_bytes, kMiB);
  EXPECT_GE(report.numa_node_count, 1);
  rlimit limit;
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  EXPECT_EQ(report.memlock_limit_bytes.has_value(), limit.rlim_cur != RLIM_INFINITY);
  if (report.memlock_limit_bytes.has_value()) {
    EXPECT_EQ(*report.memlock_limit_bytes, limit.rlim_cur);
  }
}

// Runs in a child inside the group; returns what went wrong, or "".
std::string CheckInsideCgroup(const RealCgroup& group) {
  if (!group.Enter()) return "cannot enter the group";
  const MemoryReport report = ReadMemoryReport();
  if (report.cgroup_limit_bytes != 512 * kMiB) return "limit not seen";
  if (report.cgroup_limit_file != group.limit_file()) return "limit seen elsewhere";
  const absl::Status refused = CheckPoolFits(report, kGiB);
  if (refused.code() != absl::StatusCode::kFailedPrecondition) {
    return absl::StrCat("not refused: ", refused.ToString());
  }
  // The pages of a memfd count against the group, sealed or not.
  auto fd = CreateMemfd("wavekv-test", 64 * kMiB);
  if (!fd.ok()) return fd.status().ToString();
  auto mapping = Mapping::Map(fd->get(), 64 * kMiB, Mapping::kReadWrite);
  if (!mapping.ok()) return mapping.status().ToString();
  std::memset(mapping->data(), 1, mapping->bytes());
  const uint64_t before = *report.cgroup_free_bytes;
  const uint64_t after = *ReadMemoryReport().cgroup_free_bytes;
  // The kernel accounts in batches per CPU: allow for a few MiB.
  if (before - after < 56 * kMiB) return absl::StrCat("free went from ", before, " to ", after);
  return "";
}

TEST(MemoryProbeTest, RealCgroupOf512MiBRefusesAPoolOf1GiB) {
  const RealCgroup group(512 * kMiB);
  if (!group.error().empty()) GTEST_SKIP() << group.error();
  int result[2];
  ASSERT_EQ(::pipe(result), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const std::string problem = CheckInsideCgroup(group);
    ::_exit(::write(result[1], problem.data(), problem.size()) < 0 ? 1 : 0);
  }
  ::close(result[1]);
  std::string problem(4096, '\0');
  problem.resize(
      static_cast<size_t>(std::max<ssize_t>(::read(result[0], problem.data(), problem.size()), 0)));
  ::close(result[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_EQ(problem, "");
}

}  // namespace
}  // namespace wavekv
