// The parts of `wavekv record` and `wavekv replay` that need no daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "client/cli/commands.h"
#include "client/cli/replay_report.h"
#include "client/cli/trace_sink.h"
#include "storage/trace/trace_layout.h"
#include "storage/trace/trace_reader.h"

namespace wavekv::client {
namespace {

using testing::HasSubstr;

TEST(ParseLayersTest, NumbersAndRanges) {
  const struct {
    const char* text;
    std::vector<uint32_t> layers;  // Empty: refused.
  } rows[] = {
      {"0", {0}},        {"0,5-7", {0, 5, 6, 7}},
      {"3-3,1", {3, 1}}, {"", {}},
      {"5-3", {}},       {"1,", {}},
      {"-1", {}},        {"1-", {}},
      {"a", {}},         {"1-2-3", {}},
      {"1024", {}},      {"0-4294967295", {}},
  };
  for (const auto& row : rows) {
    const auto layers = ParseLayers(row.text);
    EXPECT_EQ(layers.ok(), !row.layers.empty()) << row.text;
    if (layers.ok()) {
      EXPECT_EQ(*layers, row.layers) << row.text;
    } else {
      EXPECT_THAT(std::string(layers.status().message()), HasSubstr(row.text));
    }
  }
}

TEST(ReplayReportTest, ErrorsPercentilesAndTotals) {
  const std::vector<double> errors = RelativeErrors({3, 4, 1, 0}, {3, 0, 0, 0}, 2);
  EXPECT_NEAR(errors[0], 4.0 / 3, 1e-12);
  EXPECT_NEAR(errors[1], 1, 1e-12) << "of nothing, the distance itself";
  EXPECT_EQ(Percentile({}, 0.5), 0);
  EXPECT_EQ(Percentile({3, 1, 2}, 0), 1);
  EXPECT_EQ(Percentile({3, 1, 2}, 0.5), 2);
  EXPECT_EQ(Percentile({3, 1, 2}, 0.99), 3);

  ReplayReport report;
  StepCounters counters;
  counters.kv_bytes_read = 10;
  counters.kv_bytes_full = 100;
  report.layers[4].AddStep(counters, 200);
  report.layers[4].AddComparison({0.1, 0.3}, 0.9, 0.8);
  report.layers[7].AddStep(counters, 400);
  report.layers[7].AddComparison({0.2, 0.2}, 0.7, 0.6);
  report.layers[7].AddRecorded({0.5});
  report.overtaken = 2;
  const Json json = ToJson(report);
  EXPECT_EQ(json["layers"][1]["layer"], 7);
  EXPECT_EQ(json["total"]["steps"], 2);
  EXPECT_NEAR(json["total"]["mass_covered_mean"].get<double>(), 0.8, 1e-12);
  EXPECT_NEAR(json["total"]["mass_covered_min"].get<double>(), 0.6, 1e-12);
  EXPECT_NEAR(json["total"]["rel_error_mean"].get<double>(), 0.2, 1e-12);
  EXPECT_NEAR(json["total"]["rel_error_p99"].get<double>(), 0.3, 1e-12);
  EXPECT_NEAR(json["total"]["kv_bytes_read_ratio"].get<double>(), 0.1, 1e-12);
  EXPECT_NEAR(json["total"]["recorded_difference_max"].get<double>(), 0.5, 1e-12);
  EXPECT_FALSE(json["layers"][0].contains("recorded_difference_max"));
  const std::string text = ReplayText(report);
  EXPECT_THAT(text, HasSubstr("2 steps left out"));
  EXPECT_THAT(text, HasSubstr("80.00 %"));
}

class TraceSinkTest : public testing::Test {
 protected:
  TraceSinkTest() {
    char name[] = "/tmp/wavekv-sink-XXXXXX";
    directory_ = ::mkdtemp(name);
    path_ = directory_ + "/trace";
    sequence_.shape = {.layer_count = 1,
                       .query_head_count = 1,
                       .kv_head_count = 1,
                       .key_dim = 32,
                       .value_dim = 32,
                       .dtype = DType::kBF16,
                       .softmax_scale = 1};
    sequence_.budget.kind = TraceBudgetKind::kRatio;
    sequence_.max_tokens = 10;
    sequence_.generation = 1;
    sequence_.layers = {{0, 1}};
  }
  ~TraceSinkTest() override { std::filesystem::remove_all(directory_); }

  static std::string Text(const absl::StatusOr<std::vector<std::byte>>& bytes) {
    return std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size());
  }
  std::string Begin() const { return Text(EncodeTrace(sequence_)); }
  std::string Rows(uint64_t number) const {
    TraceRows rows;
    rows.generation = 1;
    rows.token_count = 1;
    rows.keys.resize(64);
    rows.values.resize(64);
    return Text(EncodeTrace(TraceRecord(rows), number));
  }
  static std::string End(uint64_t number, uint64_t steps = 0) {
    return Text(EncodeTrace(TraceRecord(TraceEnd{TraceEndReason::kDropped, steps}), number));
  }

  std::string directory_;
  std::string path_;
  TraceSequence sequence_;
};

TEST_F(TraceSinkTest, WritesWhatComesAndEndsWhatDoesNot) {
  {
    TraceSink sink(path_);
    ASSERT_TRUE(sink.Take(Begin() + Rows(1)).ok());
    EXPECT_FALSE(sink.end().has_value());
    ASSERT_TRUE(sink.Take(End(2)).ok());
    EXPECT_EQ(sink.end(), TraceEndReason::kDropped);
    EXPECT_TRUE(sink.Stop().ok()) << "it has its end already";
    EXPECT_TRUE(TraceReader::Open(path_).ok());
  }
  {
    TraceSink sink(path_ + "2");
    EXPECT_THAT(std::string(sink.Stop().message()), HasSubstr("there is no file"));
    ASSERT_TRUE(sink.Take(Begin()).ok());
    const absl::Status early = sink.Stop();
    EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(early.message()), HasSubstr(".partial"));
    ASSERT_TRUE(sink.Take(Rows(1)).ok());
    EXPECT_TRUE(sink.Stop().ok());
    EXPECT_EQ(sink.end(), TraceEndReason::kStopped);
  }
}

TEST_F(TraceSinkTest, RefusesWhatIsNoTrace) {
  std::string flipped = Rows(1);
  flipped.back() = static_cast<char>(flipped.back() ^ 1);
  const struct {
    const char* why;
    std::string bytes;
  } rows[] = {
      {"no record", "nonsense"},
      {"half a record", Begin().substr(0, 100)},
      {"no sequence first", Rows(0)},
      {"a flipped bit", Begin() + flipped},
      {"a number left out", Begin() + Rows(2)},
      {"rows that do not follow", Begin() + Rows(1) + Rows(2)},
      {"a wrong count of steps", Begin() + Rows(1) + End(2, 1)},
      {"more after the end", Begin() + Rows(1) + End(2) + End(3)},
  };
  int number = 0;
  for (const auto& row : rows) {
    TraceSink sink(path_ + std::to_string(number++));
    const absl::Status taken = sink.Take(row.bytes);
    EXPECT_EQ(taken.code(), absl::StatusCode::kInternal) << row.why << taken;
    EXPECT_THAT(std::string(taken.message()), HasSubstr("malformed")) << row.why;
  }
}

}  // namespace
}  // namespace wavekv::client
