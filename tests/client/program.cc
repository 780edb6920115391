#include "tests/client/program.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

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

// Reads both pipes until both are closed; false when `until` passed first.
bool Drain(Pipe* out, Pipe* err, std::chrono::steady_clock::time_point until,
           ProgramResult* result) {
  pollfd fds[2] = {{.fd = out->read_end.get(), .events = POLLIN, .revents = 0},
                   {.fd = err->read_end.get(), .events = POLLIN, .revents = 0}};
  std::string* const texts[2] = {&result->out, &result->err};
  while (fds[0].fd >= 0 || fds[1].fd >= 0) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    if (poll(fds, 2, static_cast<int>(left.count())) <= 0) continue;
    for (int i = 0; i < 2; ++i) {
      if (fds[i].fd < 0 || fds[i].revents == 0) continue;
      char bytes[4096];
      const ssize_t count = read(fds[i].fd, bytes, sizeof(bytes));
      if (count > 0) {
        texts[i]->append(bytes, static_cast<size_t>(count));
      } else {
        fds[i].fd = -1;
      }
    }
  }
  return true;
}

}  // namespace

ProgramResult RunProgram(const std::vector<std::string>& arguments,
                         const std::vector<std::string>& environment,
                         std::chrono::milliseconds timeout) {
  std::vector<std::string> argv_texts = arguments;
  std::vector<std::string> env_texts = environment;
  for (char** entry = environ; *entry != nullptr; ++entry) env_texts.emplace_back(*entry);
  std::vector<char*> argv = Pointers(argv_texts);
  std::vector<char*> env = Pointers(env_texts);

  Pipe out;
  Pipe err;
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.write_end.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, err.write_end.get(), STDERR_FILENO);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, argv[0], &actions, nullptr, argv.data(), env.data());
  posix_spawn_file_actions_destroy(&actions);
  WAVEKV_CHECK(error == 0, "the program does not start");
  out.write_end.reset();
  err.write_end.reset();

  ProgramResult result;
  const bool ended = Drain(&out, &err, std::chrono::steady_clock::now() + timeout, &result);
  if (!ended) kill(pid, SIGKILL);
  int wait_status = 0;
  waitpid(pid, &wait_status, 0);
  if (ended && WIFEXITED(wait_status)) result.exit_code = WEXITSTATUS(wait_status);
  return result;
}

}  // namespace wavekv
