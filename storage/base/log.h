// Structured log lines on stderr: ts=2026-01-31T12:00:00.123Z level=info event=listening key=value
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

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

// Writes one line with one write(2). Lines below the level are dropped. Thread-safe.
//   Log(LogLevel::kInfo, "listening", {{"address", address}, {"pid", getpid()}});
void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields = {});

// kInfo at start.
void SetLogLevel(LogLevel level);
// "debug", "info", "warning" or "error".
absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view name);

// The line that Log writes, newline included. Values longer than kLogValueBytesMax are cut.
std::string FormatLogLine(int64_t wall_time_ms, LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields);
inline constexpr size_t kLogValueBytesMax = 4096;

// Sends lines to `sink` instead of stderr; an empty one restores stderr. For tests.
void SetLogSink(std::function<void(absl::string_view line)> sink);

}  // namespace wavekv
