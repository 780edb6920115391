#include "storage/base/log.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <ctime>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "storage/base/clock.h"
#include "storage/base/mutex.h"

namespace wavekv {
namespace {

struct LogState {
  std::atomic<LogLevel> level = LogLevel::kInfo;
  Mutex mutex;
  std::function<void(absl::string_view)> sink ABSL_GUARDED_BY(mutex);
};

LogState& State() {
  static LogState* const state = new LogState;  // Never destroyed: threads may log at exit.
  return *state;
}

constexpr const char* kLevelNames[] = {"debug", "info", "warning", "error"};

void AppendValue(absl::string_view value, std::string* line) {
  const bool cut = value.size() > kLogValueBytesMax;
  value = value.substr(0, kLogValueBytesMax);
  bool plain = !value.empty() && !cut;
  for (const char c : value) {
    plain = plain && absl::ascii_isgraph(static_cast<unsigned char>(c)) && c != '"' && c != '=' &&
            c != '\\';
  }
  if (plain) {
    absl::StrAppend(line, value);
  } else {
    absl::StrAppend(line, "\"", absl::CHexEscape(value), cut ? "..." : "", "\"");
  }
}

void WriteToStderr(absl::string_view line) {
  while (!line.empty()) {
    const ssize_t count = ::write(STDERR_FILENO, line.data(), line.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;  // Nobody reads the log; there is nowhere to say so.
    line.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace

std::string FormatLogLine(int64_t wall_time_ms, LogLevel level, absl::string_view event,
                          std::initializer_list<LogField> fields) {
  const time_t seconds = static_cast<time_t>(wall_time_ms / 1000);
  tm utc{};
  ::gmtime_r(&seconds, &utc);
  char date[32];
  ::strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%S", &utc);
  std::string line = absl::StrFormat("ts=%s.%03dZ level=%s event=", date, wall_time_ms % 1000,
                                     kLevelNames[static_cast<int>(level)]);
  AppendValue(event, &line);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=");
    AppendValue(field.value, &line);
  }
  line.push_back('\n');
  return line;
}

void Log(LogLevel level, absl::string_view event, std::initializer_list<LogField> fields) {
  LogState& state = State();
  if (level < state.level.load(std::memory_order_relaxed)) return;
  const std::string line = FormatLogLine(WallTimeMs(), level, event, fields);
  MutexLock lock(&state.mutex);
  if (state.sink) {
    state.sink(line);
  } else {
    WriteToStderr(line);
  }
}

void SetLogLevel(LogLevel level) { State().level.store(level); }

absl::StatusOr<LogLevel> ParseLogLevel(absl::string_view name) {
  for (int i = 0; i < 4; ++i) {
    if (name == kLevelNames[i]) return static_cast<LogLevel>(i);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("log level is '", name, "', expected debug, info, warning or error"));
}

void SetLogSink(std::function<void(absl::string_view line)> sink) {
  LogState& state = State();
  MutexLock lock(&state.mutex);
  state.sink = std::move(sink);
}

}  // namespace wavekv
