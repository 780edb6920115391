// A progress bar on standard error, for people only: nothing is drawn unless it is a terminal.
#pragma once

#include <cstdint>
#include <string>

namespace wavekv::client {

// Not thread-safe.
class ProgressBar {
 public:
  explicit ProgressBar(std::string title);
  ~ProgressBar();  // Ends the line, if one was begun.
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  void Update(uint64_t done, uint64_t total);

 private:
  const std::string title_;
  const bool shown_;
  std::string last_line_;
};

}  // namespace wavekv::client
