// Structured log lines on stderr: ts=2026-01-31T12:00:00.123Z level=info event=listening key=value
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "storage/base/line_writer.h"

namespace wavekv {

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// One key=value pair of a line. Values: anything absl::StrCat takes, bool, absl::Status.
struct LogField {
  template <class T>
  LogField(absl::string_view field_key, const T& field_value) : key(field_key) {
    if constexpr (std::is_same_v<T, bool>) {
      value = field_value ? "true" : "false";
    } else if constexpr (std::is_same_v<T, absl::Status>) {
      value = field_value.ToString();
    } else {
      value = absl::StrCat(field_value);
    }
  }

  absl::string_view key;  // snake_case, ours, never from outside.
  std::string value;      // May come from outside: quoted and escaped where needed.
};

// Writes one line, whole. Lines below the level are dropped. Never waits for who reads stderr: what
// finds no room there is lost and counted, and the next line that finds room comes after one that
// tells how many were lost. Thread-safe. Where SIGPIPE is not ignored, a reader that went away ends
// the process.
//   Log(LogLevel::kInfo, "listening", {{"address", address}, {"pid", getpid()}});
void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields = {});

// kInfo at start.
void SetLogLevel(LogLevel level);
// "debug", "info", "warning" or "error".
absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view name);

// Lines lost so far.
uint64_t LogLinesLost();
// Waits until stderr has room for a line, so that the last one reaches a reader that is behind.
// False: the time is up. Hold no lock.
bool WaitForLogRoom(std::chrono::milliseconds timeout);

// The line that Log writes, newline included. Values are cut to what kLineBytesMax leaves for them,
// the later ones first.
std::string FormatLogLine(int64_t wall_time_ms, LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields);

// Sends lines to `sink` instead of stderr; an empty one restores stderr. For tests.
void SetLogSink(std::function<void(absl::string_view line)> sink);

}  // namespace wavekv
