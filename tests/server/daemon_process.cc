#include "tests/server/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "storage/base/check.h"

namespace wavekv {
namespace {

int MillisecondsUntil(std::chrono::steady_clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  return left.count() < 0 ? 0 : static_cast<int>(left.count());
}

}  // namespace

DaemonProcess::DaemonProcess(const std::vector<std::string>& flags,
                             const std::function<void()>& in_child) {
  int ends[2];
  WAVEKV_CHECK(pipe2(ends, O_CLOEXEC) == 0, "no pipe");
  output_.reset(ends[0]);
  const UniqueFd input(ends[1]);
  std::vector<char*> arguments = {const_cast<char*>(WAVEKVD_PATH)};
  for (const std::string& flag : flags) arguments.push_back(const_cast<char*>(flag.c_str()));
  arguments.push_back(nullptr);
  pid_ = fork();
  WAVEKV_CHECK(pid_ >= 0, "no process");
  if (pid_ == 0) {
    dup2(input.get(), STDOUT_FILENO);
    dup2(input.get(), STDERR_FILENO);
    if (in_child) in_child();
    execv(arguments[0], arguments.data());
    _exit(127);
  }
}

DaemonProcess::~DaemonProcess() {
  if (ended_) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

bool DaemonProcess::ReadSome(std::chrono::steady_clock::time_point deadline) {
  pollfd ready = {output_.get(), POLLIN, 0};
  if (poll(&ready, 1, MillisecondsUntil(deadline)) <= 0) return false;
  char chunk[4096];
  const ssize_t count = read(output_.get(), chunk, sizeof chunk);
  if (count <= 0) return false;
  log_.append(chunk, static_cast<size_t>(count));
  return true;
}

bool DaemonProcess::WaitFor(const std::string& text) {
  const auto deadline = std::chrono::steady_clock::now() + kProcessDeadline;
  while (log_.find(text) == std::string::npos) {
    if (!ReadSome(deadline)) return false;
  }
  // The rest of the line.
  while (log_.back() != '\n' && ReadSome(deadline)) {
  }
  return true;
}

void DaemonProcess::Signal(int number) const {
  kill(pid_, number);
  // Until then a thread of it may still answer a call.
  if (number == SIGSTOP) waitpid(pid_, nullptr, WUNTRACED);
}

int DaemonProcess::Wait() {
  const auto deadline = std::chrono::steady_clock::now() + kProcessDeadline;
  while (ReadSome(deadline)) {
  }
  const UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
  pollfd gone = {pidfd.get(), POLLIN, 0};
  if (ended_ || poll(&gone, 1, MillisecondsUntil(deadline)) <= 0) return exit_code_;
  int status = 0;
  waitpid(pid_, &status, 0);
  ended_ = true;
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return exit_code_;
}

std::string DaemonProcess::LogValue(const std::string& event, const std::string& key) const {
  const size_t line = log_.find("event=" + event + " ");
  if (line == std::string::npos) return "";
  const size_t end = log_.find('\n', line);
  const size_t value = log_.find(" " + key + "=", line);
  if (value == std::string::npos || value > end) return "";
  const size_t begin = value + key.size() + 2;
  return log_.substr(begin, log_.find_first_of(" \n", begin) - begin);
}

}  // namespace wavekv
