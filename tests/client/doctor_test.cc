// The doctor on machines made of files.
#include "client/cli/doctor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <map>

#include "tests/client/fake_daemon.h"

namespace wavekv::client {
namespace {

using testing::HasSubstr;
using Verdict = Check::Verdict;

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();
constexpr const char* kMeminfo =
    "MemTotal:       32000000 kB\nMemFree: 1 kB\nMemAvailable:   16777216 kB\n"
    "HugePages_Total:      12\n";

void Write(const std::string& root, const std::map<std::string, std::string>& files) {
  for (const auto& [name, text] : files) {
    const std::filesystem::path path = root + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
}

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
    std::map<std::string, std::string> files;
    uint64_t memlock;
    const char* check;
    Verdict verdict;
    const char* found;
  };
  const Row rows[] = {
      {"plenty",
       {{"/proc/meminfo", kMeminfo}},
       kUnlimited,
       "memory",
       Verdict::kOk,
       "16.0 GiB available of 30.5 GiB"},
      {"little",
       {{"/proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 9 kB\n"}},
       kUnlimited,
       "memory",
       Verdict::kWarn,
       "9.00 KiB available"},
      {"no /proc", {}, kUnlimited, "memory", Verdict::kWarn, "cannot be read"},
      {"memlock unlimited", {}, kUnlimited, "memlock", Verdict::kOk, "unlimited"},
      {"memlock of Debian", {}, 8 << 20, "memlock", Verdict::kWarn, "8.00 MiB"},
      {"no cgroup", {}, kUnlimited, "cgroup", Verdict::kOk, "none"},
      {"v2 without limit",
       {{"/sys/fs/cgroup/cgroup.controllers", "memory"},
        {"/proc/self/cgroup", "0::/a/b\n"},
        {"/sys/fs/cgroup/a/b/memory.max", "max\n"}},
       kUnlimited,
       "cgroup",
       Verdict::kOk,
       "v2, no memory limit"},
      {"v2, the limit is the parent's",
       {{"/sys/fs/cgroup/cgroup.controllers", "memory"},
        {"/proc/self/cgroup", "0::/a/b\n"},
        {"/sys/fs/cgroup/a/memory.max", "536870912\n"},
        {"/sys/fs/cgroup/a/b/memory.max", "max\n"}},
       kUnlimited,
       "cgroup",
       Verdict::kWarn,
       "v2, memory limit 512 MiB"},
      {"v1",
       {{"/proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/1\n"},
        {"/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "8589934592\n"}},
       kUnlimited,
       "cgroup",
       Verdict::kOk,
       "v1, memory limit 8.00 GiB"},
      {"v1 without limit",
       {{"/proc/self/cgroup", "4:memory:/\n"},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"}},
       kUnlimited,
       "cgroup",
       Verdict::kOk,
       "v1, no memory limit"},
      {"huge pages",
       {{"/proc/meminfo", kMeminfo}},
       kUnlimited,
       "huge pages",
       Verdict::kOk,
       "12 reserved"},
      {"no GPU", {{"/dev/null", ""}}, kUnlimited, "gpu", Verdict::kOk, "--backend=host"},
      {"two GPUs",
       {{"/dev/nvidia0", ""},
        {"/dev/nvidia1", ""},
        {"/dev/nvidiactl", ""},
        {"/proc/driver/nvidia/version", "NVRM version: 580.1\nGCC\n"}},
       kUnlimited,
       "gpu",
       Verdict::kOk,
       "2 device(s), NVRM version: 580.1"},
      {"driver without devices",
       {{"/proc/driver/nvidia/version", "NVRM\n"}},
       kUnlimited,
       "gpu",
       Verdict::kWarn,
       "no /dev/nvidia<N>"},
      {"devices without driver",
       {{"/dev/nvidia0", ""}},
       kUnlimited,
       "gpu",
       Verdict::kWarn,
       "1 device(s)"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    const TempDir root;
    Write(root.path(), row.files);
    const Check check = Find(CheckMachine(root.path(), row.memlock), row.check);
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
