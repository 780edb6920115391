#include "tests/integration/daemons.h"

#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "tests/gpu/driver/use_fake_cuda.h"

namespace wavekv::integration {
namespace {

// Of a machine that builds at the same time.
constexpr std::chrono::seconds kStartTimeout(60);
constexpr uint64_t kContextBytesMax = uint64_t{1} << 30;  // Of wavebufferd on a GPU.

absl::StatusOr<std::unique_ptr<Process>> StartAndWait(const ProcessOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<Process> process, Process::Start(options));
  if (process->WaitForOutput("event=ready", kStartTimeout)) return process;
  process->Stop();
  return absl::UnavailableError(
      absl::StrCat(options.argv[0], " did not come up; it wrote:\n", process->Output()));
}

DaemonOptions WithBackend(DaemonOptions options) {
  const char* const wanted = std::getenv("WAVEKV_TEST_BACKEND");
  if (options.backend.empty()) options.backend = wanted == nullptr ? "host" : wanted;
  if (wanted != nullptr && !options.wave_buffer) {
    options.wave_buffer = true;
    // Such tests may stage all of a sequence in one step, and that twice.
    options.wavekvd_flags.push_back("--wave_buffer_staging_tokens=32768");
  }
  return options;
}

}  // namespace

Daemons::Daemons(const DaemonOptions& options) : options_(WithBackend(options)) {}

Daemons::~Daemons() {
  if (wavekvd_ != nullptr) wavekvd_->Stop();
  if (wavebufferd_ != nullptr) wavebufferd_->Stop();
}

absl::StatusOr<std::unique_ptr<Daemons>> Daemons::Start(const DaemonOptions& options) {
  std::unique_ptr<Daemons> daemons(new Daemons(options));
  if (daemons->options_.wave_buffer) WAVEKV_RETURN_IF_ERROR(daemons->RestartWavebufferd());
  WAVEKV_RETURN_IF_ERROR(daemons->RestartWavekvd());
  return daemons;
}

std::string Daemons::address() const {
  return absl::StrCat("unix:", directory_.path(), "/wavekvd.sock");
}

std::string Daemons::tcp_address() const {
  constexpr std::string_view kKey = "tcp_address=";
  const std::string output = wavekvd_->Output();
  const size_t begin = output.find(kKey);
  if (begin == std::string::npos) return "";
  const size_t value = begin + kKey.size();
  return output.substr(value, output.find_first_of(" \n", value) - value);
}

std::string Daemons::WaveBufferAddress() const {
  return absl::StrCat("unix:", directory_.path(), "/wavebufferd.sock");
}

absl::Status Daemons::RestartWavebufferd() {
  const std::string& backend = options_.backend;
  if (backend == "cuda" && !options_.real_gpu) (void)UseFakeCuda();
  const uint64_t context_bytes = backend == "cuda" ? kContextBytesMax : 0;
  ProcessOptions process;
  process.argv = {ProgramPath("wavebufferd"), absl::StrCat("--backend=", backend),
                  absl::StrCat("--listen=", WaveBufferAddress()),
                  absl::StrCat("--bytes_max=", options_.wave_buffer_bytes + context_bytes)};
  WAVEKV_ASSIGN_OR_RETURN(wavebufferd_, StartAndWait(process));
  return absl::OkStatus();
}

std::vector<std::string> Daemons::WavekvdArgv() const {
  std::vector<std::string> argv = {ProgramPath("wavekvd"), absl::StrCat("--listen=", address()),
                                   absl::StrCat("--pool_bytes=", options_.pool_bytes)};
  if (options_.wave_buffer) argv.push_back(absl::StrCat("--wave_buffer=", WaveBufferAddress()));
  argv.insert(argv.end(), options_.wavekvd_flags.begin(), options_.wavekvd_flags.end());
  return argv;
}

absl::Status Daemons::RestartWavekvd() {
  ProcessOptions process;
  process.argv = WavekvdArgv();
  process.cpu = options_.cpu;
  WAVEKV_ASSIGN_OR_RETURN(wavekvd_, StartAndWait(process));
  return absl::OkStatus();
}

}  // namespace wavekv::integration
