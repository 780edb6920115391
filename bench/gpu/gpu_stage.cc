// How fast rows come to the device: as misses that the step's kernel reads from pinned host memory,
// and as steps that wavekvd gathers and stages by DMA; beside them a plain copy of pinned memory.
//
//   bench_gpu_stage [--batch=8] [--tokens=122880] [--rounds=50] [--seed=N] [--out=FILE]
//
// Misses: a step whose cache is empty and takes nothing in, by the time of its attend kernel.
// Staged: blocks of 8 rows of K and V at random places, 8 MB in each call. Medians. Last line:
// JSON.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "bench/gpu/attend_bench.h"
#include "gpu/device_copier.h"
#include "gpu/driver/device.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

constexpr uint64_t kBlockBytes = uint64_t{gpu::kBlockRows} * kBenchDim * 2;  // K or V of a block.
constexpr uint64_t kStageBytes = uint64_t{8} << 20;
constexpr uint64_t kCopyBytes = uint64_t{256} << 20;
constexpr uint64_t kPoolBytes = uint64_t{1} << 30;

struct Options {
  AttendOptions attend;
  uint32_t rounds = 50;
  std::string out;
};

// Median of `rounds` calls, in GB/s.
absl::StatusOr<double> MedianGbps(uint32_t rounds, uint64_t bytes,
                                  const std::function<absl::Status()>& call) {
  std::vector<double> seconds;
  for (uint32_t i = 0; i < rounds + 3; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    WAVEKV_RETURN_IF_ERROR(call());
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (i >= 3) seconds.push_back(took.count());
  }
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  return bytes / seconds[seconds.size() / 2] / 1e9;
}

struct StageSpeeds {
  double copy_gbps = 0;
  double stage_gbps = 0;
};

absl::StatusOr<StageSpeeds> MeasureStaging(const Options& options) {
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<const CudaDriver> driver, CudaDriver::Get());
  WAVEKV_ASSIGN_OR_RETURN(const CudaDevice::Identity identity, CudaDevice::Identify(*driver, 0));
  WAVEKV_ASSIGN_OR_RETURN(const auto device, CudaDevice::Open(driver, identity));
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<const SharedAllocation> memory,
                          SharedAllocation::Create(device, kCopyBytes));
  WAVEKV_ASSIGN_OR_RETURN(const auto mapping,
                          DeviceMapping::Map(memory, DeviceMapping::kReadWrite));
  StageSpeeds speeds;
  {
    WAVEKV_ASSIGN_OR_RETURN(const auto pinned, PinnedMemory::Allocate(device, kCopyBytes));
    WAVEKV_ASSIGN_OR_RETURN(const auto stream, DeviceStream::Create(device));
    WAVEKV_ASSIGN_OR_RETURN(
        speeds.copy_gbps, MedianGbps(options.rounds, kCopyBytes, [&]() -> absl::Status {
          WAVEKV_RETURN_IF_ERROR(stream->CopyIn(mapping->address(), pinned->data(), kCopyBytes));
          return stream->Synchronise();
        }));
  }
  const std::vector<std::byte> pool(kPoolBytes, std::byte{1});
  DeviceCopier copier(device, DeviceCopier::OptionsForThisMachine());
  std::mt19937_64 random(options.attend.seed);
  std::vector<ByteCopy> copies(kStageBytes / kBlockBytes);
  WAVEKV_ASSIGN_OR_RETURN(
      speeds.stage_gbps, MedianGbps(options.rounds, kStageBytes, [&]() -> absl::Status {
        for (size_t i = 0; i < copies.size(); ++i) {
          const uint64_t block = random() % (kPoolBytes / kBlockBytes);
          copies[i] = {pool.data() + block * kBlockBytes, i * kBlockBytes, kBlockBytes};
        }
        return copier.Write(mapping->address(), copies, std::nullopt);
      }));
  return speeds;
}

absl::Status Run(const Options& options) {
  AttendBench bench(options.attend);
  WAVEKV_RETURN_IF_ERROR(bench.Prepare());
  WAVEKV_ASSIGN_OR_RETURN(const nlohmann::json missed, bench.RunForced(0));
  WAVEKV_ASSIGN_OR_RETURN(const StageSpeeds speeds, MeasureStaging(options));
  const double miss_gbps =
      double(missed["pcie_bytes"]) / double(missed["breakdown_us"]["attend"]) / 1e3;
  const nlohmann::json row = {{"batch", options.attend.batch},
                              {"tokens", options.attend.tokens},
                              {"miss_bytes", missed["pcie_bytes"]},
                              {"miss_gbps", miss_gbps},
                              {"stage_bytes", kStageBytes},
                              {"stage_gbps", speeds.stage_gbps},
                              {"copy_gbps", speeds.copy_gbps},
                              {"miss_of_copy", miss_gbps / speeds.copy_gbps},
                              {"rounds", options.rounds}};
  if (!options.out.empty()) std::ofstream(options.out) << row.dump(1) << "\n";
  std::printf("%s\n", row.dump().c_str());
  return absl::OkStatus();
}

}  // namespace

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Rows on their way to the device.");
  app.add_option("--batch", options.attend.batch)->check(CLI::PositiveNumber);
  app.add_option("--tokens", options.attend.tokens)->check(CLI::PositiveNumber);
  app.add_option("--layers", options.attend.layers)->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds)->check(CLI::PositiveNumber);
  app.add_option("--seed", options.attend.seed);
  app.add_option("--out", options.out);
  CLI11_PARSE(app, argc, argv);
  return ReportRun("bench_gpu_stage", [&] { return Run(options); });
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
