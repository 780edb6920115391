#include "storage/base/log.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "tests/unread_pipe.h"

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
}

// A longer line could be torn by a pipe.
TEST(LogTest, NoLineIsLongerThanAPipeTakesWhole) {
  const std::string head = "ts=1970-01-01T00:00:00.000Z level=info event=e k=";
  const size_t room = kLineBytesMax - head.size() - 1;
  EXPECT_EQ(OneValue(std::string(room, 'x')), std::string(room, 'x'));
  EXPECT_EQ(OneValue(std::string(room + 1, 'x')), "\"" + std::string(room - 5, 'x') + "...\"");
  EXPECT_EQ(OneValue(std::string(1'000'000, 'x')), "\"" + std::string(room - 5, 'x') + "...\"");
  const std::string escaped = OneValue(std::string(room, '\n'));
  EXPECT_LE(escaped.size(), room);
  EXPECT_GT(escaped.size(), room - 4);
  EXPECT_EQ(escaped.substr(escaped.size() - 5), "n...\"");
  // Every field has a place, and the last gets what the others leave.
  const std::string line = FormatLogLine(
      0, LogLevel::kInfo, "e",
      {{"a", std::string(8000, '\xff')}, {"b", "short"}, {"c", std::string(8000, 'c')}});
  EXPECT_LE(line.size(), kLineBytesMax);
  EXPECT_NE(line.find("...\" b="), std::string::npos);
  EXPECT_EQ(line.substr(line.size() - 10), " c=\"c...\"\n") << line;
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

TEST(LogTest, LinesThatNobodyReadsAreLostAndTheNextReaderIsTold) {
  UnreadPipe pipe;
  const StderrTo unread(pipe.write_end());
  const uint64_t before = LogLinesLost();
  pipe.Fill();
  for (int i = 0; i < 3; ++i) Log(LogLevel::kError, "lost");
  EXPECT_EQ(LogLinesLost() - before, 3u);
  EXPECT_EQ(pipe.Drain(), UnreadPipe::Filling());
  EXPECT_TRUE(WaitForLogRoom(std::chrono::seconds(0)));
  Log(LogLevel::kInfo, "read");
  Log(LogLevel::kInfo, "read_too");
  const std::vector<std::string> lines = absl::StrSplit(pipe.Drain(), '\n');
  ASSERT_EQ(lines.size(), 4u);
  EXPECT_TRUE(absl::EndsWith(lines[0], "level=warning event=log_lines_lost count=3")) << lines[0];
  EXPECT_TRUE(absl::EndsWith(lines[1], "event=read")) << lines[1];
  EXPECT_TRUE(absl::EndsWith(lines[2], "event=read_too")) << lines[2];
  EXPECT_EQ(lines[3], "");
  pipe.Fill();
  EXPECT_FALSE(WaitForLogRoom(std::chrono::seconds(0)));
}

// Room for a line, but not for the longer one that tells of those before.
TEST(LogTest, NoLineComesBehindLostOnesUntold) {
  UnreadPipe pipe;
  const StderrTo unread(pipe.write_end());
  pipe.Fill();
  Log(LogLevel::kInfo, "a");
  ASSERT_EQ(pipe.Drain(), UnreadPipe::Filling());
  constexpr size_t kSpare = 60;
  ASSERT_LT(FormatLogLine(0, LogLevel::kInfo, "b", {}).size(), kSpare);
  ASSERT_GT(FormatLogLine(0, LogLevel::kWarning, "log_lines_lost", {{"count", 1}}).size(), kSpare);
  pipe.Fill(kSpare);
  Log(LogLevel::kInfo, "b");
  EXPECT_EQ(pipe.Drain(), UnreadPipe::Filling(kSpare));
  Log(LogLevel::kInfo, "c");
  const std::vector<std::string> lines = absl::StrSplit(pipe.Drain(), '\n');
  ASSERT_EQ(lines.size(), 3u);
  EXPECT_TRUE(absl::EndsWith(lines[0], "event=log_lines_lost count=2")) << lines[0];
  EXPECT_TRUE(absl::EndsWith(lines[1], "event=c")) << lines[1];
}

// Whatever a reader takes, and when: lines are whole, and those that are read and those that are
// told to be lost are all there were.
TEST(LogTest, WhatIsReadAndWhatIsToldAddUp) {
  constexpr uint64_t kLines = 4 * 500;
  UnreadPipe pipe;
  const StderrTo slow(pipe.write_end());
  std::string text;
  {
    std::atomic<int> running = 4;
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([t, &running] {
        for (int i = 0; i < 500; ++i) {
          Log(LogLevel::kInfo, "e", {{"t", t}, {"text", std::string(1 + i % 300, 'x')}});
        }
        --running;
      });
    }
    while (running > 0) text += pipe.Drain();
    for (std::thread& thread : threads) thread.join();
  }
  text += pipe.Drain();
  Log(LogLevel::kInfo, "end");
  text += pipe.Drain();
  uint64_t read = 0;
  uint64_t told = 0;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    EXPECT_TRUE(absl::StartsWith(line, "ts=2") && line.find("ts=", 1) == line.npos) << line;
    const size_t count = line.find("event=log_lines_lost count=");
    uint64_t lost = 0;
    if (count != line.npos) {
      EXPECT_TRUE(absl::SimpleAtoi(line.substr(line.rfind('=') + 1), &lost)) << line;
    } else if (!absl::EndsWith(line, "event=end")) {
      EXPECT_EQ(line.back(), 'x') << line;
      ++read;
    }
    told += lost;
  }
  EXPECT_EQ(read + told, kLines);
  EXPECT_TRUE(absl::EndsWith(text, "event=end\n"));
}

}  // namespace
}  // namespace wavekv
