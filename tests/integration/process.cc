#include "tests/integration/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"

namespace wavekv::integration {
namespace {

constexpr size_t kOutputPartBytes = 256 * 1024;

absl::Status ErrnoStatus(absl::string_view what) {
  return absl::InternalError(absl::StrCat(what, ": ", strerror(errno)));
}

// The mask of only the n-th of the CPUs this process may use.
absl::StatusOr<cpu_set_t> OneCpu(int n) {
  cpu_set_t usable;
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return ErrnoStatus("sched_getaffinity");
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &usable) || n-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return one;
  }
  return absl::NotFoundError("fewer CPUs than asked for");
}

// Between fork and exec: only async-signal-safe calls.
[[noreturn]] void RunChild(char* const* argv, int output, pid_t parent, const cpu_set_t* cpus) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  if (cpus != nullptr && sched_setaffinity(0, sizeof(*cpus), cpus) != 0) _exit(127);
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (dup2(null, STDIN_FILENO) < 0 || dup2(output, STDOUT_FILENO) < 0 ||
      dup2(output, STDERR_FILENO) < 0) {
    _exit(127);
  }
  execv(argv[0], argv);
  constexpr char kMessage[] = "cannot execute the program\n";
  (void)!write(STDERR_FILENO, kMessage, sizeof(kMessage) - 1);
  _exit(127);
}

// The value of a "Name:  123 ..." line of /proc/<pid>/status.
uint64_t StatusValue(pid_t pid, const std::string& name) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string word; status >> word;) {
    uint64_t value = 0;
    if (word == name && status >> value) return value;
  }
  return 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Process>> Process::Start(const ProcessOptions& options) {
  std::vector<char*> argv;
  for (const std::string& argument : options.argv)
    argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  cpu_set_t cpus;
  if (options.cpu.has_value()) {
    const absl::StatusOr<cpu_set_t> one = OneCpu(*options.cpu);
    if (!one.ok()) return one.status();
    cpus = *one;
  }
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus("pipe2");
  UniqueFd read_end(ends[0]);
  const UniqueFd write_end(ends[1]);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return ErrnoStatus("fork");
  if (pid == 0) {
    RunChild(argv.data(), write_end.get(), parent, options.cpu.has_value() ? &cpus : nullptr);
  }
  // The child is not waited for yet, so its pid cannot be another's.
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  WAVEKV_CHECK(pidfd.get() >= 0, "pidfd_open of a child of ours");
  return std::unique_ptr<Process>(new Process(pid, std::move(pidfd), std::move(read_end)));
}

Process::Process(pid_t pid, UniqueFd pidfd, UniqueFd output)
    : pid_(pid),
      pidfd_(std::move(pidfd)),
      output_fd_(std::move(output)),
      reader_([this] { ReadOutput(); }) {}

Process::~Process() {
  Stop();
  reader_.join();
}

void Process::ReadOutput() {
  char buffer[4096];
  while (true) {
    const ssize_t bytes = read(output_fd_.get(), buffer, sizeof(buffer));
    if (bytes < 0 && errno == EINTR) continue;
    MutexLock lock(&mutex_);
    if (bytes <= 0) {
      output_ended_ = true;
      changed_.NotifyAll();
      return;
    }
    output_.append(buffer, static_cast<size_t>(bytes));
    if (output_.size() > 3 * kOutputPartBytes) {
      output_.erase(kOutputPartBytes, output_.size() - 2 * kOutputPartBytes);
    }
    changed_.NotifyAll();
  }
}

bool Process::WaitForOutput(absl::string_view text, std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(&mutex_);
  while (output_.find(text.data(), 0, text.size()) == std::string::npos) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (output_ended_ || left <= left.zero()) return false;
    changed_.WaitFor(&mutex_, left);
  }
  return true;
}

std::string Process::Output() const {
  MutexLock lock(&mutex_);
  return output_;
}

void Process::Signal(int signal) {
  MutexLock lock(&mutex_);
  if (!exit_code_.has_value()) kill(pid_, signal);
}

void Process::Suspend() {
  Signal(SIGSTOP);
  siginfo_t info;
  while (waitid(P_PID, static_cast<id_t>(pid_), &info, WSTOPPED | WEXITED | WNOWAIT) != 0 &&
         errno == EINTR) {
  }
}

std::optional<int> Process::WaitForExit(std::chrono::milliseconds timeout) {
  pollfd poll_fd = {pidfd_.get(), POLLIN, 0};
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now());
    const int ready = poll(&poll_fd, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
    if (ready < 0 && errno == EINTR) continue;
    if (ready == 0) return std::nullopt;
    break;
  }
  MutexLock lock(&mutex_);
  if (!exit_code_.has_value()) {
    int status = 0;
    WAVEKV_CHECK(waitpid(pid_, &status, 0) == pid_, "an exited child of ours is waited for once");
    exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  return exit_code_;
}

int Process::Stop(std::chrono::milliseconds timeout) {
  Signal(SIGTERM);
  Signal(SIGCONT);  // Only a running process obeys.
  if (const std::optional<int> code = WaitForExit(timeout)) return *code;
  Signal(SIGKILL);
  return WaitForExit(std::chrono::hours(1)).value();
}

int ThreadCount(pid_t pid) { return static_cast<int>(StatusValue(pid, "Threads:")); }

int DescriptorCount(pid_t pid) {
  std::error_code error;
  std::filesystem::directory_iterator entries(absl::StrCat("/proc/", pid, "/fd"), error);
  if (error) return 0;
  return static_cast<int>(std::distance(begin(entries), end(entries)));
}

uint64_t ResidentBytes(pid_t pid) { return StatusValue(pid, "VmRSS:") * 1024; }

}  // namespace wavekv::integration
