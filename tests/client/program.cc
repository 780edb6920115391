#include "tests/client/program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "storage/base/check.h"
#include "storage/base/unique_fd.h"

extern char** environ;

namespace wavekv {
namespace {

struct Pipe {
  Pipe() {
    int fds[2];
    WAVEKV_CHECK(pipe2(fds, O_CLOEXEC) == 0, "no pipe");
    read_end.reset(fds[0]);
    write_end.reset(fds[1]);
  }
  UniqueFd read_end;
  UniqueFd write_end;
};

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Where a program's standard input, output and error go.
struct Streams {
  posix_spawn_file_actions_t actions;
  Streams() { posix_spawn_file_actions_init(&actions); }
  ~Streams() { posix_spawn_file_actions_destroy(&actions); }
  Streams(const Streams&) = delete;
};

pid_t Spawn(const Streams& streams, std::vector<std::string> arguments,
            std::vector<std::string> environment) {
  for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
  std::vector<char*> argv = Pointers(arguments);
  std::vector<char*> env = Pointers(environment);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, argv[0], &streams.actions, nullptr, argv.data(), env.data());
  WAVEKV_CHECK(error == 0, "the program does not start");
  return pid;
}

// Reads until everything is closed; false when `until` passed first. `on_data` is called after
// each piece.
bool Drain(std::vector<pollfd> fds, const std::vector<std::string*>& texts,
           std::chrono::steady_clock::time_point until, const std::function<void()>& on_data) {
  size_t open = fds.size();
  while (open > 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    if (poll(fds.data(), fds.size(), static_cast<int>(left.count())) <= 0) continue;
    for (size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].fd < 0 || fds[i].revents == 0) continue;
      char bytes[4096];
      const ssize_t count = read(fds[i].fd, bytes, sizeof(bytes));
      if (count > 0) {
        texts[i]->append(bytes, static_cast<size_t>(count));
        on_data();
      } else {
        fds[i].fd = -1;
        --open;
      }
    }
  }
  return true;
}

void Reap(pid_t pid, bool ended, ProgramResult* result) {
  if (!ended) kill(pid, SIGKILL);
  int wait_status = 0;
  waitpid(pid, &wait_status, 0);
  if (ended && WIFEXITED(wait_status)) result->exit_code = WEXITSTATUS(wait_status);
}

}  // namespace

ProgramResult RunProgram(const std::vector<std::string>& arguments,
                         const std::vector<std::string>& environment,
                         std::chrono::milliseconds timeout) {
  Pipe out;
  Pipe err;
  Streams streams;
  posix_spawn_file_actions_addopen(&streams.actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&streams.actions, out.write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&streams.actions, err.write_end.get(), STDERR_FILENO);
  const pid_t pid = Spawn(streams, arguments, environment);
  out.write_end.reset();
  err.write_end.reset();

  ProgramResult result;
  const bool ended =
      Drain({{.fd = out.read_end.get(), .events = POLLIN, .revents = 0},
             {.fd = err.read_end.get(), .events = POLLIN, .revents = 0}},
            {&result.out, &result.err}, std::chrono::steady_clock::now() + timeout, [] {});
  Reap(pid, ended, &result);
  return result;
}

ProgramResult RunOnTerminal(const std::vector<std::string>& arguments,
                            const std::vector<std::string>& environment, const std::string& until,
                            const std::string& keys, std::chrono::milliseconds timeout) {
  const UniqueFd terminal(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  WAVEKV_CHECK(terminal.valid() && grantpt(terminal.get()) == 0 && unlockpt(terminal.get()) == 0,
               "no terminal");
  const std::string name = ptsname(terminal.get());
  Streams streams;
  posix_spawn_file_actions_addopen(&streams.actions, STDIN_FILENO, name.c_str(), O_RDWR, 0);
  posix_spawn_file_actions_adddup2(&streams.actions, STDIN_FILENO, STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&streams.actions, STDIN_FILENO, STDERR_FILENO);
  const pid_t pid = Spawn(streams, arguments, environment);

  ProgramResult result;
  bool typed = keys.empty();
  const auto type = [&] {
    if (typed || result.out.find(until) == std::string::npos) return;
    typed = write(terminal.get(), keys.data(), keys.size()) == static_cast<ssize_t>(keys.size());
  };
  // The other side's last close reads as an error here, and so as the end.
  const bool ended = Drain({{.fd = terminal.get(), .events = POLLIN, .revents = 0}}, {&result.out},
                           std::chrono::steady_clock::now() + timeout, type);
  Reap(pid, ended, &result);
  return result;
}

}  // namespace wavekv
