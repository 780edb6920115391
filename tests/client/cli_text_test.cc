// What the command draws.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/cli/histogram.h"
#include "client/cli/json.h"
#include "client/cli/overview.h"
#include "client/cli/text.h"

namespace wavekv::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(TextTest, Numbers) {
  EXPECT_EQ(BytesText(0), "0 B");
  EXPECT_EQ(BytesText(1023), "1023 B");
  EXPECT_EQ(BytesText(1024), "1.00 KiB");
  EXPECT_EQ(BytesText(1536), "1.50 KiB");
  EXPECT_EQ(BytesText((10 << 20) - 1), "10.0 MiB");
  EXPECT_EQ(BytesText((1 << 20) - 1), "1.00 MiB") << "never 1024 KiB";
  EXPECT_EQ(BytesText(~uint64_t{0}), "16.0 EiB");
  EXPECT_EQ(CountText(0), "0");
  EXPECT_EQ(CountText(999), "999");
  EXPECT_EQ(CountText(1000), "1,000");
  EXPECT_EQ(CountText(12345678), "12,345,678");
  EXPECT_EQ(DurationText(999), "999 ms");
  EXPECT_EQ(DurationText(61'000), "1 min 1 s");
  EXPECT_EQ(DurationText(26ull * 3600 * 1000), "1 d 2 h");
  EXPECT_EQ(ShareText(1, 8), "12.5 %");
  EXPECT_EQ(ShareText(1, 0), "–");
}

TEST(TextTest, TheDaemonsTextCannotSteerATerminal) {
  EXPECT_EQ(Printable("plain, µ and é"), "plain, µ and é");
  EXPECT_EQ(Printable("a\x1b[2Jb\nc"), "a?[2Jb?c");
  EXPECT_EQ(Printable("\xc2\x9b"
                      "2J"),
            "?2J");
}

TEST(TextTest, TablesAlignByCharacters) {
  Table table({{"name", Table::Align::kLeft}, {"n"}});
  table.Add({"µµ", "1"});
  table.Add({"abcdef", "22"});
  EXPECT_EQ(table.Render(1), " name     n\n µµ       1\n abcdef  22\n");
}

TEST(HistogramTest, BarsAreMeasuredInEighths) {
  EXPECT_EQ(Bar(1, 3), "███");
  EXPECT_EQ(Bar(0.5, 3), "█▌ ");
  EXPECT_EQ(Bar(0, 3), "   ");
  EXPECT_EQ(Bar(7, 2), "██") << "clamped";
  EXPECT_EQ(Bar(-1, 2), "  ");
  EXPECT_EQ(Bar(0.0 / 0.0, 2), "  ");
  for (double share = 0; share <= 1; share += 0.01) EXPECT_EQ(DisplayWidth(Bar(share, 7)), 7u);
}

TEST(HistogramTest, DrawsItsBins) {
  const Histogram sizes{.edges = {0, 1, 2, 4, 8, 16}, .counts = {0, 8, 1, 800, 0}};
  EXPECT_THAT(RenderHistogram(sizes, true, 4),
              ElementsAre("    1 │▏    8 (1.0 %)",  //
                          "2 – 3 │▏    1 (0.1 %)",  // At least an eighth.
                          "4 – 7 │████ 800 (98.9 %)"));
  const Histogram radii{.edges = {0.5, 1.25, 2}, .counts = {3, 1}};
  EXPECT_THAT(RenderHistogram(radii, false, 3),
              ElementsAre("0.5 – 1.25 │███ 3 (75.0 %)", "  1.25 – 2 │█   1 (25.0 %)"));
}

TEST(HistogramTest, NothingCountedSaysSo) {
  EXPECT_THAT(RenderHistogram({}, true, 10), ElementsAre("(nothing)"));
  EXPECT_THAT(RenderHistogram({.edges = {0, 1}, .counts = {0}}, true, 10),
              ElementsAre("(nothing)"));
}

TEST(OverviewTest, StatusOfABusyDaemon) {
  DaemonStats stats{.daemon_version = "9.9",
                    .uptime_ms = 61'000,
                    .pool_bytes_max = 4096,
                    .pool_reserved_bytes = 2048,
                    .isa = "avx512"};
  stats.tenants.push_back({.tenant = "uid:7\x1b[2J", .sequences = 3});
  stats.counters.kv_bytes_read = 25;
  stats.counters.kv_bytes_full = 100;
  stats.calls = {{"Attend", 1234}, {"Pin", 0}};
  const std::string text = StatusText("unix:/x", stats);
  EXPECT_THAT(text, HasSubstr("wavekvd 9.9 at unix:/x, up 1 min 1 s"));
  EXPECT_THAT(text, HasSubstr("2.00 KiB reserved of 4.00 KiB"));
  EXPECT_THAT(text, HasSubstr("25.00 % of KV bytes read"));
  EXPECT_THAT(text, HasSubstr("Attend 1,234"));
  EXPECT_THAT(text, Not(HasSubstr("Pin")));
  EXPECT_THAT(text, Not(HasSubstr("\x1b")));
}

TEST(OverviewTest, TopShowsWhatChangedBusiestFirst) {
  Snapshot before;
  before.stats.calls = {{"Attend", 100}, {"Heartbeat", 5}};
  before.sequences.resize(2);
  before.sequences[0].id = 41;
  before.sequences[0].counters.kv_bytes_read = 1000;
  before.sequences[1].id = 42;
  Snapshot now = before;
  now.stats.calls["Attend"] = 150;
  now.stats.calls["Heartbeat"] = 50;
  now.stats.counters = {.kv_bytes_read = 10, .kv_bytes_full = 100};
  now.sequences[1].counters = {.kv_bytes_read = 10, .kv_bytes_full = 100};
  const std::string text = TopText("unix:/x", &before, now, 500, 1);
  EXPECT_THAT(text, HasSubstr("Attend 100.0/s"));
  EXPECT_THAT(text, Not(HasSubstr("Heartbeat")));
  EXPECT_THAT(text, HasSubstr("10.00 % of KV bytes read"));
  EXPECT_THAT(text, HasSubstr("42")) << "41 read more, but not now";
  EXPECT_THAT(text, HasSubstr("... and 1 more"));
  EXPECT_THAT(TopText("unix:/x", nullptr, now, 0, 9), Not(HasSubstr("/s")));
}

TEST(JsonTest, IdsAreBothAndBadTextIsMended) {
  SequenceSummary sequence;
  sequence.id = 18446744073709551615ull;
  sequence.label = "broken \xff UTF-8";
  const Json json = Json::parse(DumpJson(ToJson(sequence)));
  EXPECT_EQ(json["id"], "18446744073709551615");
  EXPECT_EQ(json["sequence_id"].get<uint64_t>(), 18446744073709551615ull);
  EXPECT_THAT(json["label"].get<std::string>(), HasSubstr("UTF-8"));
}

}  // namespace
}  // namespace wavekv::client
