#include "tests/gpu/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "storage/base/check.h"
#include "tests/program_path.h"

namespace wavekv {
namespace {

std::vector<std::string> WavebufferdArguments(const std::string& socket,
                                              const std::vector<std::string>& flags) {
  std::vector<std::string> arguments = {ProgramPath("wavebufferd"), "--listen=unix:" + socket};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  return arguments;
}

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& arguments) {
  int ends[2];
  WAVEKV_CHECK(::pipe2(ends, O_CLOEXEC) == 0, "a pipe for the child");
  pipe_.reset(ends[0]);
  const UniqueFd write_end(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, write_end.get(), STDERR_FILENO);
  std::vector<char*> argv;
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const int error = ::posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  WAVEKV_CHECK(error == 0, arguments[0].c_str());
}

ChildProcess::~ChildProcess() { Kill(); }

bool ChildProcess::ReadMore(std::chrono::steady_clock::time_point deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  pollfd entry{pipe_.get(), POLLIN, 0};
  const int left_ms = static_cast<int>(std::max<int64_t>(left.count(), 0));
  if (::poll(&entry, 1, left_ms) <= 0) return false;
  char buffer[4096];
  const ssize_t count = ::read(pipe_.get(), buffer, sizeof(buffer));
  if (count <= 0) return false;
  output_.append(buffer, static_cast<size_t>(count));
  return true;
}

std::string ChildProcess::WaitForLine(const std::string& text) {
  const auto deadline = std::chrono::steady_clock::now() + kWait;
  while (true) {
    size_t end;
    while ((end = output_.find('\n', consumed_)) != std::string::npos) {
      const std::string line = output_.substr(consumed_, end - consumed_);
      consumed_ = end + 1;
      if (line.find(text) != std::string::npos) return line;
    }
    if (!ReadMore(deadline)) return "";
  }
}

void ChildProcess::Signal(int signal) const {
  if (!ended_) ::kill(pid_, signal);
  // Its threads stop one after another; a caller that looks at once may still meet a running one.
  if (signal == SIGSTOP) ::waitpid(pid_, nullptr, WUNTRACED);
}

int ChildProcess::WaitForExit() {
  if (ended_) return exit_;
  const auto deadline = std::chrono::steady_clock::now() + kWait;
  while (ReadMore(deadline)) {  // To the end of its output.
  }
  const bool ended = WaitUntil([this] {
    int status = 0;
    if (::waitpid(pid_, &status, WNOHANG) != pid_) return false;
    exit_ = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    return true;
  });
  ended_ = ended;
  return exit_;
}

void ChildProcess::Kill() {
  if (ended_) return;
  ::kill(pid_, SIGKILL);
  (void)WaitForExit();
}

WavebufferdProcess::WavebufferdProcess(const std::string& directory,
                                       const std::vector<std::string>& flags)
    : socket_(directory + "/wavebufferd.sock"),
      process_(WavebufferdArguments(socket_, flags)),
      ready_(!process_.WaitForLine("event=ready").empty()) {}

}  // namespace wavekv
