#include "client/cli/doctor.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "client/cli/text.h"
#include "grpcpp/grpcpp.h"
#include "proto/rpc/protocol_version.h"

namespace wavekv::client {
namespace {

using Verdict = Check::Verdict;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kMemoryWarnBytes = 2 * kGiB;
constexpr uint64_t kMemlockWarnBytes = 64 * kMiB;
constexpr size_t kFileBytesMax = size_t{1} << 20;
constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();
// cgroup v1 writes "no limit" as the largest multiple of the page size.
constexpr uint64_t kCgroupV1Unlimited = uint64_t{1} << 62;

// A small kernel file; nullopt when it cannot be read.
std::optional<std::string> ReadFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::string text(kFileBytesMax, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

// "MemAvailable:  123 kB" of /proc/meminfo, in bytes; for HugePages_Total the bare number.
std::optional<uint64_t> MeminfoValue(const std::string& meminfo, absl::string_view field) {
  for (absl::string_view line : absl::StrSplit(meminfo, '\n')) {
    if (!absl::ConsumePrefix(&line, absl::StrCat(field, ":"))) continue;
    const bool kilobytes = absl::ConsumeSuffix(&line, " kB");
    uint64_t value = 0;
    if (!absl::SimpleAtoi(line, &value) || value > kUnlimited / 1024) return std::nullopt;
    return kilobytes ? value * 1024 : value;
  }
  return std::nullopt;
}

Check CheckVersions() {
  return {.name = "versions",
          .found = absl::StrCat("wavekv ", WAVEKV_VERSION, ", protocol ", kProtocolVersionMin,
                                " to ", kProtocolVersionMax, ", gRPC ", grpc::Version())};
}

Check CheckMemory(const std::string& meminfo) {
  const std::optional<uint64_t> available = MeminfoValue(meminfo, "MemAvailable");
  const std::optional<uint64_t> total = MeminfoValue(meminfo, "MemTotal");
  if (!available.has_value() || !total.has_value()) {
    return {.name = "memory",
            .verdict = Verdict::kWarn,
            .found = "/proc/meminfo cannot be read",
            .cure = "mount /proc"};
  }
  Check check{.name = "memory",
              .found = absl::StrCat(BytesText(*available), " available of ", BytesText(*total))};
  if (*available < kMemoryWarnBytes) {
    check.verdict = Verdict::kWarn;
    check.cure = "free memory, or give wavekvd a smaller --pool_bytes";
  }
  return check;
}

// The limit of our own cgroup or the nearest one above it that has one.
Check CheckCgroup(const std::string& root) {
  Check check{.name = "cgroup"};
  const bool v2 = std::filesystem::exists(root + "/sys/fs/cgroup/cgroup.controllers");
  const bool v1 = std::filesystem::exists(root + "/sys/fs/cgroup/memory");
  if (!v2 && !v1) {
    check.found = "none mounted: no limit to see";
    return check;
  }
  const std::string base = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
  const char* const file = v2 ? "memory.max" : "memory.limit_in_bytes";
  std::filesystem::path group;
  const std::string self = ReadFile(root + "/proc/self/cgroup").value_or("");
  for (const absl::string_view line : absl::StrSplit(self, '\n')) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() == 3 && parts[1] == (v2 ? "" : "memory")) group = parts[2];
  }
  uint64_t limit = kUnlimited;
  while (true) {
    const std::string path = absl::StrCat(root, base, group.string(), "/", file);
    uint64_t value = 0;
    const std::optional<std::string> text = ReadFile(path);
    if (text.has_value() && absl::SimpleAtoi(*text, &value) && value < kCgroupV1Unlimited) {
      limit = std::min(limit, value);
    }
    if (group.empty() || group == "/") break;
    group = group.parent_path();
  }
  check.found = absl::StrCat(
      v2 ? "v2, " : "v1, ",
      limit == kUnlimited ? "no memory limit" : absl::StrCat("memory limit ", BytesText(limit)));
  if (limit < kMemoryWarnBytes) {
    check.verdict = Verdict::kWarn;
    check.cure = "raise the container's memory limit, or give wavekvd a smaller --pool_bytes";
  }
  return check;
}

Check CheckMemlock(uint64_t bytes) {
  Check check{.name = "memlock",
              .found = bytes == kUnlimited ? "unlimited" : absl::StrCat(BytesText(bytes))};
  if (bytes < kMemlockWarnBytes) {
    check.verdict = Verdict::kWarn;
    check.cure =
        "ulimit -l unlimited, LimitMEMLOCK=infinity, or --ulimit memlock=-1 for a container: "
        "memory that is not locked is copied to a GPU slowly";
  }
  return check;
}

Check CheckHugePages(const std::string& root, const std::string& meminfo) {
  const uint64_t reserved = MeminfoValue(meminfo, "HugePages_Total").value_or(0);
  const std::string shmem = FirstLine(
      ReadFile(root + "/sys/kernel/mm/transparent_hugepage/shmem_enabled").value_or("unknown"));
  return {.name = "huge pages",
          .found = absl::StrCat(CountText(reserved),
                                " reserved; transparent ones for shared memory: ", Printable(shmem),
                                " (optional, used where they are there)")};
}

Check CheckGpu(const std::string& root) {
  size_t devices = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/dev", ignored)) {
    const std::string filename = entry.path().filename().string();
    absl::string_view name = filename;
    uint32_t index = 0;
    if (absl::ConsumePrefix(&name, "nvidia") && absl::SimpleAtoi(name, &index)) ++devices;
  }
  const std::optional<std::string> driver = ReadFile(root + "/proc/driver/nvidia/version");
  if (devices == 0 && !driver.has_value()) {
    return {.name = "gpu", .found = "none: wavebufferd runs with --backend=host"};
  }
  if (devices == 0) {
    return {.name = "gpu",
            .verdict = Verdict::kWarn,
            .found = "a driver is loaded, but there is no /dev/nvidia<N>",
            .cure = "pass the devices into the container (--gpus), or run nvidia-modprobe"};
  }
  if (!driver.has_value()) {
    return {.name = "gpu",
            .verdict = Verdict::kWarn,
            .found = absl::StrCat(devices, " device(s), but no /proc/driver/nvidia/version"),
            .cure = "load the NVIDIA driver"};
  }
  return {.name = "gpu",
          .found = absl::StrCat(devices, " device(s), ", Printable(FirstLine(*driver)))};
}

Check CheckWaveBuffers(const DaemonStats& stats) {
  Check check{.name = "wave buffer"};
  if (stats.wave_buffers.empty()) {
    check.found = "none attached: Attend works, AttendStaged does not";
    return check;
  }
  std::vector<std::string> parts;
  for (const WaveBufferStats& buffer : stats.wave_buffers) {
    parts.push_back(absl::StrCat(Printable(buffer.device_uuid), " (", Printable(buffer.backend),
                                 "): ", buffer.connected ? "connected, " : "not connected, ",
                                 buffer.pinned ? "pinned" : "pageable"));
    if (buffer.connected) continue;
    check.verdict = Verdict::kFail;
    check.cure = "start wavebufferd with the address that wavekvd's flag names";
  }
  check.found = absl::StrJoin(parts, "; ");
  return check;
}

}  // namespace

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk:
      return "OK";
    case Verdict::kWarn:
      return "WARN";
    case Verdict::kFail:
      return "FAIL";
  }
  return "FAIL";
}

std::vector<Check> CheckMachine(const std::string& root, uint64_t memlock_bytes) {
  const std::string meminfo = ReadFile(root + "/proc/meminfo").value_or("");
  return {CheckVersions(),
          CheckMemory(meminfo),
          CheckCgroup(root),
          CheckMemlock(memlock_bytes),
          CheckHugePages(root, meminfo),
          CheckGpu(root)};
}

std::vector<Check> CheckDaemon(const ClientOptions& options) {
  const absl::StatusOr<std::unique_ptr<Admin>> admin = Admin::Connect(options);
  const absl::StatusOr<DaemonStats> stats =
      admin.ok() ? (*admin)->GetStats() : absl::StatusOr<DaemonStats>(admin.status());
  if (!stats.ok()) {
    return {{.name = "daemon",
             .verdict = Verdict::kFail,
             .found = absl::StrCat(options.address, ": ",
                                   Printable(std::string(stats.status().message()))),
             .cure = "start wavekvd, or name its address with --address or WAVEKV_ADDRESS; the "
                     "socket's owner must be you (mode 0600)"}};
  }
  Check daemon{
      .name = "daemon",
      .found = absl::StrCat(options.address, ": wavekvd ", Printable(stats->daemon_version),
                            ", up ", DurationText(stats->uptime_ms), ", ", Printable(stats->isa))};
  if (stats->daemon_version != WAVEKV_VERSION) {
    daemon.verdict = Verdict::kWarn;
    daemon.cure =
        absl::StrCat("use wavekvd and wavekv of one release; this is wavekv ", WAVEKV_VERSION);
  }
  return {daemon, CheckWaveBuffers(*stats)};
}

}  // namespace wavekv::client
