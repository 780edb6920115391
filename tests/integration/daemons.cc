#include "tests/integration/daemons.h"

#include <chrono>
#include <filesystem>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::integration {
namespace {

// Of a machine that builds at the same time.
constexpr std::chrono::seconds kStartTimeout(60);

absl::StatusOr<std::unique_ptr<Process>> StartAndWait(const ProcessOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<Process> process, Process::Start(options));
  if (process->WaitForOutput("event=ready", kStartTimeout)) return process;
  process->Stop();
  return absl::UnavailableError(
      absl::StrCat(options.argv[0], " did not come up; it wrote:\n", process->Output()));
}

}  // namespace

std::string ProgramPath(const std::string& name) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path beside = self.parent_path() / name;
  if (!error && std::filesystem::is_regular_file(beside, error)) return beside.string();
  return absl::StrCat(WAVEKV_BIN_DIR, "/", name);
}

Daemons::Daemons(std::unique_ptr<TempDir> directory, const DaemonOptions& options)
    : directory_(std::move(directory)), options_(options) {}

Daemons::~Daemons() {
  if (wavekvd_ != nullptr) wavekvd_->Stop();
  if (wavebufferd_ != nullptr) wavebufferd_->Stop();
}

absl::StatusOr<std::unique_ptr<Daemons>> Daemons::Start(const DaemonOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<TempDir> directory, TempDir::Create());
  std::unique_ptr<Daemons> daemons(new Daemons(std::move(directory), options));
  if (options.wave_buffer) WAVEKV_RETURN_IF_ERROR(daemons->StartWavebufferd());
  WAVEKV_RETURN_IF_ERROR(daemons->RestartWavekvd());
  return daemons;
}

std::string Daemons::address() const {
  return absl::StrCat("unix:", directory_->path(), "/wavekvd.sock");
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
  return absl::StrCat("unix:", directory_->path(), "/wavebufferd.sock");
}

absl::Status Daemons::StartWavebufferd() {
  ProcessOptions process;
  process.argv = {ProgramPath("wavebufferd"), "--backend=host",
                  absl::StrCat("--listen=", WaveBufferAddress()),
                  absl::StrCat("--bytes_max=", options_.wave_buffer_bytes)};
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
