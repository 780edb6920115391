#include "storage/base/log.h"

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

std::string OneValue(absl::string_view value) {
  const std::string line = FormatLogLine(0, LogLevel::kInfo, "e", {{"k", value}});
  const std::string head = "ts=1970-01-01T00:00:00.000Z level=info event=e k=";
  EXPECT_EQ(line.substr(0, head.size()), head);
  EXPECT_EQ(line.back(), '\n');
  return line.substr(head.size(), line.size() - head.size() - 1);
}

TEST(LogTest, LineHasTimeLevelEventAndFields) {
  EXPECT_EQ(FormatLogLine(1767268800123, LogLevel::kWarning, "listening",
                          {{"address", "unix:/run/wavekv"},
                           {"count", 3},
                           {"ok", true},
                           {"status", absl::NotFoundError("x")}}),
            "ts=2026-01-01T12:00:00.123Z level=warning event=listening address=unix:/run/wavekv "
            "count=3 ok=true status=\"NOT_FOUND: x\"\n");
}

TEST(LogTest, ValuesCannotForgeFieldsOrLines) {
  EXPECT_EQ(OneValue("plain-1.5_x"), "plain-1.5_x");
  EXPECT_EQ(OneValue(""), "\"\"");
  EXPECT_EQ(OneValue("two words"), "\"two words\"");
  EXPECT_EQ(OneValue("a=b"), "\"a=b\"");
  EXPECT_EQ(OneValue("say \"hi\""), "\"say \\\"hi\\\"\"");
  EXPECT_EQ(OneValue("x\nlevel=error"), "\"x\\nlevel=error\"");
  EXPECT_EQ(OneValue("back\\slash"), "\"back\\\\slash\"");
  EXPECT_EQ(OneValue("\x1b[31m\x9b"), "\"\\x1b[31m\\x9b\"");
  const std::string cut = OneValue(std::string(kLogValueBytesMax + 1, 'x'));
  EXPECT_EQ(cut, "\"" + std::string(kLogValueBytesMax, 'x') + "...\"");
}

TEST(LogTest, LevelsParseAndFilter) {
  std::vector<std::string> lines;
  SetLogSink([&](absl::string_view line) { lines.emplace_back(line); });
  for (const char* name : {"debug", "info", "warning", "error"}) {
    const auto level = ParseLogLevel(name);
    ASSERT_TRUE(level.ok()) << level.status();
    SetLogLevel(*level);
    lines.clear();
    for (const LogLevel l :
         {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError}) {
      Log(l, "e");
    }
    EXPECT_EQ(lines.size(), 4u - static_cast<size_t>(*level)) << name;
  }
  EXPECT_EQ(ParseLogLevel("loud").status().code(), absl::StatusCode::kInvalidArgument);
  SetLogLevel(LogLevel::kInfo);
  SetLogSink(nullptr);
}

TEST(LogTest, ThreadsDoNotMixTheirLines) {
  std::multiset<std::string> tails;
  SetLogSink([&](absl::string_view line) { tails.emplace(line.substr(line.find("event="))); });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 100; ++i) Log(LogLevel::kInfo, "e", {{"t", t}, {"i", i}});
    });
  }
  for (std::thread& thread : threads) thread.join();
  SetLogSink(nullptr);
  EXPECT_EQ(tails.size(), 400u);
  EXPECT_EQ(tails.count("event=e t=3 i=99\n"), 1u);
}

TEST(LogTest, GoesToStderrByDefault) {
  testing::internal::CaptureStderr();
  Log(LogLevel::kError, "failed", {{"why", "no reason"}});
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_NE(text.find(" level=error event=failed why=\"no reason\"\n"), std::string::npos) << text;
}

}  // namespace
}  // namespace wavekv
