#include "storage/base/log.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <ctime>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "storage/base/check.h"
#include "storage/base/clock.h"
#include "storage/base/line_writer.h"
#include "storage/base/mutex.h"

namespace wavekv {
namespace {

struct LogState {
  std::atomic<LogLevel> level = LogLevel::kInfo;
  Mutex mutex;
  std::function<void(absl::string_view)> sink ABSL_GUARDED_BY(mutex);
  LineWriter stderr_lines ABSL_GUARDED_BY(mutex){STDERR_FILENO};
  std::atomic<uint64_t> lost = 0;  // Written with the mutex held.
  uint64_t lost_told ABSL_GUARDED_BY(mutex) = 0;
};

LogState& State() {
  static LogState* const state = new LogState;  // Never destroyed: threads may log at exit.
  return *state;
}

constexpr const char* kLevelNames[] = {"debug", "info", "warning", "error"};

// What a value takes at least: "...", with its quotes.
constexpr size_t kCutValueBytes = 5;

bool IsPlain(absl::string_view value) {
  for (const char c : value) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c)) || c == '"' || c == '=' || c == '\\') {
      return false;
    }
  }
  return !value.empty();
}

// Appends at most `room` bytes, kCutValueBytes at least.
void AppendValue(absl::string_view value, size_t room, std::string* line) {
  if (value.size() <= room && IsPlain(value)) {
    absl::StrAppend(line, value);
    return;
  }
  size_t kept = std::min(value.size(), room);
  while (true) {
    const std::string text = absl::CHexEscape(value.substr(0, kept));
    const size_t bytes = text.size() + (kept < value.size() ? kCutValueBytes : 2);
    if (bytes <= room) {
      absl::StrAppend(line, "\"", text, kept < value.size() ? "..." : "", "\"");
      return;
    }
    // No byte becomes more than four.
    kept -= std::min(kept, (bytes - room + 3) / 4);
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
  // Every field has its place, however long those before it are.
  size_t reserved = line.size() + kCutValueBytes + 1;
  for (const LogField& field : fields) reserved += field.key.size() + 2 + kCutValueBytes;
  WAVEKV_CHECK(reserved <= kLineBytesMax, "keys that fill a line");
  size_t room = kLineBytesMax - reserved + kCutValueBytes;
  const auto append = [&](absl::string_view value) {
    const size_t before = line.size();
    AppendValue(value, room, &line);
    room = room + kCutValueBytes + before - line.size();
  };
  append(event);
  for (const LogField& field : fields) {
    absl::StrAppend(&line, " ", field.key, "=");
    append(field.value);
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
    return;
  }
  const uint64_t lost = state.lost.load(std::memory_order_relaxed);
  // A line behind lost ones comes after the one that tells of them, or not at all.
  const bool told =
      lost == state.lost_told ||
      state.stderr_lines.Write(FormatLogLine(WallTimeMs(), LogLevel::kWarning, "log_lines_lost",
                                             {{"count", lost - state.lost_told}}));
  if (told) state.lost_told = lost;
  if (!told || !state.stderr_lines.Write(line)) {
    state.lost.store(lost + 1, std::memory_order_relaxed);
  }
}

uint64_t LogLinesLost() { return State().lost.load(std::memory_order_relaxed); }

bool WaitForLogRoom(std::chrono::milliseconds timeout) {
  return WaitForRoom(STDERR_FILENO, timeout);
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
