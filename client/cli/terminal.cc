#include "client/cli/terminal.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>

namespace wavekv::client {
namespace {

constexpr size_t kRowsDefault = 24;

sigset_t EndSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

}  // namespace

LiveTerminal::LiveTerminal() : redraws_(isatty(STDOUT_FILENO) == 1) {
  termios raw{};
  if (isatty(STDIN_FILENO) == 1 && tcgetattr(STDIN_FILENO, &raw) == 0) {
    saved_ = raw;
    raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
    tcsetattr(STDIN_FILENO, TCSANOW, &raw);
  }
  const sigset_t signals = EndSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal_fd_ = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
}

LiveTerminal::~LiveTerminal() {
  if (saved_.has_value()) tcsetattr(STDIN_FILENO, TCSANOW, &*saved_);
  if (signal_fd_ >= 0) close(signal_fd_);
  // A signal that came and was not taken is still pending: the caller is ending anyway.
}

bool LiveTerminal::Wait(std::chrono::milliseconds duration) {
  const auto until = std::chrono::steady_clock::now() + duration;
  bool reads_keys = saved_.has_value();
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return true;
    pollfd fds[2] = {{.fd = signal_fd_, .events = POLLIN, .revents = 0},
                     {.fd = reads_keys ? STDIN_FILENO : -1, .events = POLLIN, .revents = 0}};
    if (poll(fds, 2, static_cast<int>(left.count())) <= 0) continue;
    if (fds[0].revents != 0) return false;
    if (fds[1].revents == 0) continue;
    char key = 0;
    if (read(STDIN_FILENO, &key, 1) != 1) reads_keys = false;
    if (key == 'q' || key == 'Q') return false;
  }
}

size_t LiveTerminal::rows() const {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_row == 0) return kRowsDefault;
  return size.ws_row;
}

}  // namespace wavekv::client
