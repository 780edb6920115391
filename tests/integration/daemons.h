// A wavekvd and a wavebufferd of one's own: real processes in a temporary directory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tests/integration/process.h"
#include "tests/program_path.h"
#include "tests/temp_dir.h"

namespace wavekv::integration {

struct DaemonOptions {
  // Start a wavebufferd and attach it: host memory's, or a GPU's (the fake driver's, but for
  // WAVEKV_TEST_GPU=1) where the environment says WAVEKV_TEST_BACKEND=cuda. Where the environment
  // names either backend there is always one, whatever this says.
  bool wave_buffer = true;
  uint64_t pool_bytes = 512ull << 20;
  uint64_t wave_buffer_bytes = 256ull << 20;
  std::vector<std::string> wavekvd_flags;  // Added after ours.
  std::string backend;                     // In place of the environment's.
  bool real_gpu = false;                   // Backend cuda is a GPU's, never the fake driver's.
  std::optional<int> cpu;                  // Bind wavekvd to one CPU, as taskset does.
};

// Both are up when Start returns, and stopped by pid when the object goes. Not thread-safe.
class Daemons {
 public:
  // Unavailable, with what the daemon wrote, when one of them does not come up in time.
  static absl::StatusOr<std::unique_ptr<Daemons>> Start(const DaemonOptions& options);
  ~Daemons();

  // "unix:..." of wavekvd, for the SDK.
  std::string address() const;
  // "host:port" of wavekvd when its flags make it listen on TCP; empty otherwise.
  std::string tcp_address() const;
  const std::string& directory() const { return directory_.path(); }
  bool has_wave_buffer() const { return wavebufferd_ != nullptr; }
  // Of wavebufferd: host or cuda.
  const std::string& backend() const { return options_.backend; }
  Process& wavekvd() { return *wavekvd_; }
  Process& wavebufferd() { return *wavebufferd_; }

  // Starts another in place of one that is gone.
  absl::Status RestartWavekvd();
  absl::Status RestartWavebufferd();

  // The command line of wavekvd, for a test that starts a second one itself.
  std::vector<std::string> WavekvdArgv() const;

 private:
  explicit Daemons(const DaemonOptions& options);
  std::string WaveBufferAddress() const;

  const TempDir directory_;
  const DaemonOptions options_;
  std::unique_ptr<Process> wavebufferd_;
  std::unique_ptr<Process> wavekvd_;
};

}  // namespace wavekv::integration
