#include "client/cli/doctor.h"

#include <filesystem>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "client/cli/text.h"
#include "grpcpp/grpcpp.h"
#include "proto/rpc/protocol_version.h"
#include "storage/base/cgroup.h"
#include "storage/base/memory_probe.h"

namespace wavekv::client {
namespace {

using Verdict = Check::Verdict;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kMemoryWarnBytes = 2 * kGiB;

std::string FirstLine(const std::string& text) { return text.substr(0, text.find('\n')); }

Check CheckVersions() {
  return {.name = "versions",
          .found = absl::StrCat("wavekv ", WAVEKV_VERSION, ", protocol ", kProtocolVersionMin,
                                " to ", kProtocolVersionMax, ", gRPC ", grpc::Version())};
}

Check CheckMemory(const MemoryReport& memory) {
  if (memory.machine_total_bytes == 0) {
    return {.name = "memory",
            .verdict = Verdict::kWarn,
            .found = "/proc/meminfo cannot be read",
            .cure = "mount /proc"};
  }
  Check check{.name = "memory",
              .found = absl::StrCat(BytesText(memory.machine_available_bytes), " available of ",
                                    BytesText(memory.machine_total_bytes))};
  if (memory.machine_available_bytes < kMemoryWarnBytes) {
    check.verdict = Verdict::kWarn;
    check.cure = "free memory, or give wavekvd a smaller --pool_bytes";
  }
  return check;
}

// The tightest limit of our own control group and those above it.
Check CheckCgroup(const MemoryReport& memory) {
  Check check{.name = "cgroup"};
  if (memory.cgroup_version == 0) {
    check.found = "none mounted: no limit to see";
    return check;
  }
  check.found = absl::StrCat("v", memory.cgroup_version, ", ");
  if (!memory.cgroup_limit_bytes.has_value()) {
    absl::StrAppend(&check.found, "no memory limit");
    return check;
  }
  absl::StrAppend(&check.found, "memory limit ", BytesText(*memory.cgroup_limit_bytes), ", ",
                  BytesText(memory.cgroup_free_bytes.value_or(0)), " of it free (",
                  memory.cgroup_limit_file, ")");
  if (memory.cgroup_free_bytes.value_or(0) < kMemoryWarnBytes) {
    check.verdict = Verdict::kWarn;
    check.cure = "raise the container's memory limit, or give wavekvd a smaller --pool_bytes";
  }
  return check;
}

Check CheckMemlock(const MemoryReport& memory) {
  return {.name = "memlock",
          .found = absl::StrCat(memory.memlock_limit_bytes.has_value()
                                    ? BytesText(*memory.memlock_limit_bytes)
                                    : "unlimited",
                                " (the host backend locks no memory)")};
}

Check CheckHugePages(const MemoryReport& memory) {
  return {.name = "huge pages",
          .found = absl::StrCat(
              CountText(memory.huge_pages_total), " reserved, ", CountText(memory.huge_pages_free),
              " free; transparent ones for shared memory: ",
              memory.shmem_huge_pages.empty() ? "unknown" : Printable(memory.shmem_huge_pages),
              " (optional; the pool asks for them)")};
}

Check CheckNuma(const MemoryReport& memory) {
  return {.name = "numa",
          .found = absl::StrCat(memory.numa_node_count, " node",
                                memory.numa_node_count == 1 ? ""
                                                            : "s; the pool's pages lie where "
                                                              "they are touched first")};
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
  const std::optional<std::string> driver = ReadSmallFile(root + "/proc/driver/nvidia/version");
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

std::vector<Check> CheckMachine(const std::string& root) {
  const MemoryReport memory = ReadMemoryReport(root);
  return {CheckVersions(),        CheckMemory(memory), CheckCgroup(memory), CheckMemlock(memory),
          CheckHugePages(memory), CheckNuma(memory),   CheckGpu(root)};
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
