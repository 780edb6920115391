// The terminal of a live display: single keys, signals, and what there is to restore.
#pragma once

#include <termios.h>

#include <chrono>
#include <cstddef>
#include <optional>

namespace wavekv::client {

// While it lives, keys come without Enter and echo (where standard input is a terminal), and SIGINT
// and SIGTERM end the display instead of the process. One at a time.
class LiveTerminal {
 public:
  LiveTerminal();
  ~LiveTerminal();
  LiveTerminal(const LiveTerminal&) = delete;
  LiveTerminal& operator=(const LiveTerminal&) = delete;

  // Waits `duration`; false at once when q or ctrl-C came.
  bool Wait(std::chrono::milliseconds duration);
  // Standard output is a terminal: the display redraws in place.
  bool redraws() const { return redraws_; }
  size_t rows() const;

 private:
  const bool redraws_;
  std::optional<termios> saved_;
  int signal_fd_ = -1;
};

}  // namespace wavekv::client
