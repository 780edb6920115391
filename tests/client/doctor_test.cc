// The doctor on machines made of files.
#include "client/cli/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "tests/client/fake_daemon.h"
#include "tests/storage/fake_root.h"

namespace wavekv::client {
namespace {

using testing::HasSubstr;
using Verdict = Check::Verdict;

constexpr const char* kMeminfo =
    "MemTotal:       32000000 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n"
    "HugePages_Total:      12\nHugePages_Free:       5\n";
constexpr const char* kGroup = "/sys/fs/cgroup";

Check Find(const std::vector<Check>& checks, const std::string& name) {
  for (const Check& check : checks) {
    if (check.name == name) return check;
  }
  ADD_FAILURE() << "no check named " << name;
  return {};
}

TEST(DoctorTest, Machines) {
  struct Row {
    const char* why;
    std::function<void(FakeRoot*)> machine;
    const char* check;
    Verdict verdict;
    const char* found;
  };
  const auto nothing = [](FakeRoot*) {};
  const auto usual = [](FakeRoot* root) { root->Write("/proc/meminfo", kMeminfo); };
  const auto v2 = [](const std::string& own, const std::string& parent, const std::string& high) {
    return [=](FakeRoot* root) {
      root->UseCgroupV2("/a/b");
      root->Write(std::string(kGroup) + "/a/memory.max", parent + "\n");
      root->Write(std::string(kGroup) + "/a/b/memory.max", own + "\n");
      root->Write(std::string(kGroup) + "/a/b/memory.high", high + "\n");
    };
  };
  const auto v1 = [](const std::string& limit) {
    return [=](FakeRoot* root) {
      root->UseCgroupV1("memory", "/docker/1");
      root->Write(std::string(kGroup) + "/memory/docker/1/memory.limit_in_bytes", limit + "\n");
    };
  };
  const Row rows[] = {
      {"plenty", usual, "memory", Verdict::kOk, "16.0 GiB available of 30.5 GiB"},
      {"little",
       [](FakeRoot* root) { root->Write("/proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 9 kB\n"); },
       "memory", Verdict::kWarn, "9.00 KiB available"},
      {"no /proc", nothing, "memory", Verdict::kWarn, "cannot be read"},
      {"memlock unlimited", nothing, "memlock", Verdict::kOk, "unlimited"},
      // Nothing that there is locks memory: a small limit is no trouble.
      {"memlock of Debian",
       [](FakeRoot* root) {
         root->Write("/proc/self/limits", "Max locked memory  8388608  8388608  bytes\n");
       },
       "memlock", Verdict::kOk, "8.00 MiB"},
      {"no cgroup", nothing, "cgroup", Verdict::kOk, "none"},
      {"v2 without limit", v2("max", "max", "max"), "cgroup", Verdict::kOk, "v2, no memory limit"},
      {"v2, the limit is the parent's", v2("max", "536870912", "max"), "cgroup", Verdict::kWarn,
       "v2, memory limit 512 MiB"},
      {"v2, throttled before it is killed", v2("8589934592", "max", "1073741824"), "cgroup",
       Verdict::kWarn, "v2, memory limit 1.00 GiB"},
      {"v1", v1("8589934592"), "cgroup", Verdict::kOk, "v1, memory limit 8.00 GiB"},
      {"v1 without limit", v1("9223372036854771712"), "cgroup", Verdict::kOk,
       "v1, no memory limit"},
      {"a large group that is full",
       [&](FakeRoot* root) {
         v1("8589934592")(root);
         root->Write(std::string(kGroup) + "/memory/docker/1/memory.usage_in_bytes",
                     "8589934592\n");
       },
       "cgroup", Verdict::kWarn, "0 B of it free"},
      {"huge pages", usual, "huge pages", Verdict::kOk, "12 reserved, 5 free"},
      {"transparent huge pages",
       [](FakeRoot* root) {
         root->Write("/sys/kernel/mm/transparent_hugepage/shmem_enabled",
                     "always within_size [advise] never deny force\n");
       },
       "huge pages", Verdict::kOk, "shared memory: advise"},
      {"two NUMA nodes",
       [](FakeRoot* root) { root->Write("/sys/devices/system/node/online", "0-1\n"); }, "numa",
       Verdict::kOk, "2 nodes"},
      {"no GPU", [](FakeRoot* root) { root->Write("/dev/null", ""); }, "gpu", Verdict::kOk,
       "--backend=host"},
      {"two GPUs",
       [](FakeRoot* root) {
         for (const char* name : {"nvidia0", "nvidia1", "nvidiactl"}) {
           root->Write(std::string("/dev/") + name, "");
         }
         root->Write("/proc/driver/nvidia/version", "NVRM version: 580.1\nGCC\n");
       },
       "gpu", Verdict::kOk, "2 device(s), NVRM version: 580.1"},
      {"driver without devices",
       [](FakeRoot* root) { root->Write("/proc/driver/nvidia/version", "NVRM\n"); }, "gpu",
       Verdict::kWarn, "no /dev/nvidia<N>"},
      {"devices without driver", [](FakeRoot* root) { root->Write("/dev/nvidia0", ""); }, "gpu",
       Verdict::kWarn, "1 device(s)"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    FakeRoot root;
    row.machine(&root);
    const Check check = Find(CheckMachine(root.path()), row.check);
    EXPECT_EQ(VerdictName(check.verdict), std::string(VerdictName(row.verdict)));
    EXPECT_THAT(check.found, HasSubstr(row.found));
    EXPECT_EQ(check.cure.empty(), check.verdict == Verdict::kOk) << "trouble comes with its cure";
  }
}

TEST(DoctorTest, DaemonAwayOldAndWithoutItsBuffer) {
  const TempDir dir;
  const ClientOptions options{.address = "unix:" + dir.path() + "/d.sock",
                              .deadline = std::chrono::seconds(20)};
  const Check away = Find(CheckDaemon(options), "daemon");
  EXPECT_EQ(away.verdict, Verdict::kFail);
  EXPECT_THAT(away.found, HasSubstr(options.address));
  EXPECT_THAT(away.cure, HasSubstr("WAVEKV_ADDRESS"));

  FakeDaemon daemon(options.address, {});
  daemon.on_stats = [](v1::GetStatsReply* reply) {
    v1::WaveBufferStats* const buffer = reply->add_wave_buffers();
    buffer->set_backend("host");
    buffer->set_device_uuid("host");
    return grpc::Status::OK;
  };
  const std::vector<Check> checks = CheckDaemon(options);
  EXPECT_EQ(Find(checks, "daemon").verdict, Verdict::kWarn) << "version \"fake\" is not ours";
  EXPECT_EQ(Find(checks, "wave buffer").verdict, Verdict::kFail);
  EXPECT_THAT(Find(checks, "wave buffer").found, HasSubstr("not connected"));
}

}  // namespace
}  // namespace wavekv::client
