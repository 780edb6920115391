// Planted needles, end to end: the mock decoder through the SDK against real daemons.

#include <chrono>

#include "gmock/gmock.h"
#include "tests/client/program.h"
#include "tests/integration/daemons.h"
#include "tests/integration/sdk_test.h"
#include "tests/mock_decoder/modes.h"

namespace wavekv::integration {
namespace {

using std::chrono::seconds;

struct NeedlesRow {
  std::string name;
  uint64_t token_count;
  uint64_t seed;
  double ratio_max;  // Of the KV bytes read.
  mock::SdkRunOptions sdk = {};
  DType dtype = DType::kBF16;
  uint32_t needle_count = 32;
};

void PrintTo(const NeedlesRow& row, std::ostream* out) { *out << row.name; }

class NeedlesTest : public testing::TestWithParam<NeedlesRow> {};

TEST_P(NeedlesTest, AllAreFound) {
  mock::RunOptions options;
  options.mode = mock::Mode::kCompare;
  options.world.token_count = GetParam().token_count;
  options.world.needle_count = GetParam().needle_count;
  options.world.model.seed = GetParam().seed;
  options.world.model.dtype = GetParam().dtype;
  options.sdk = GetParam().sdk;
  const absl::StatusOr<mock::Report> report = mock::RunMode(options);
  ASSERT_OK(report.status());
  SCOPED_TRACE(report->ToText());
  EXPECT_EQ(report->needles_asked, GetParam().needle_count);
  EXPECT_EQ(report->needles_found_exact, GetParam().needle_count);
  EXPECT_EQ(report->needles_found, GetParam().needle_count);
  // The rest is found by retrieval, not by a steady zone that is larger than it says.
  EXPECT_EQ(report->needles_found_steady_only, report->needles_planted_steady);
  EXPECT_LT(*report->needles_planted_steady, GetParam().needle_count / 2);
  EXPECT_LE(*report->max_rel_error, 0.05);
  EXPECT_LE(*report->kv_bytes_read_ratio, GetParam().ratio_max);
}

// Shares of the KV bytes: 128 sketched clusters and the steady zone weigh more in short contexts.
constexpr double kShortRatio = 0.25;
constexpr double kMiddleRatio = 0.25;
constexpr double kLongRatio = 0.15;

INSTANTIATE_TEST_SUITE_P(
    Contexts, NeedlesTest,
    testing::Values(NeedlesRow{"4096_seed1", 4096, 1, kShortRatio},
                    NeedlesRow{"4096_seed2", 4096, 2, kShortRatio},
                    NeedlesRow{"4096_seed3", 4096, 3, kShortRatio},
                    NeedlesRow{"4096_seed4", 4096, 4, kShortRatio},
                    NeedlesRow{"4096_seed5", 4096, 5, kShortRatio},
                    // A rest of 960 tokens after the boundary stays exact.
                    NeedlesRow{"9216_with_a_short_rest", 9216, 6, kMiddleRatio},
                    NeedlesRow{"32768", 32768, 7, kLongRatio},
                    NeedlesRow{"131072", 131072, 8, kLongRatio},
                    NeedlesRow{"4096_f16", 4096, 9, kShortRatio, {}, DType::kF16},
                    NeedlesRow{"4096_f32", 4096, 10, kShortRatio, {}, DType::kF32}),
    [](const auto& row) { return row.param.name; });

// Ten clusters of 334 and no sketch: a needle that the index averages away is lost here.
const mock::SdkRunOptions kStrict = {.retrieval_ratio = 0.03, .sketch_clusters = 0};

INSTANTIATE_TEST_SUITE_P(StrictBudgets, NeedlesTest,
                         testing::Values(NeedlesRow{"seed1", 4096, 1, 0.16, kStrict},
                                         NeedlesRow{"seed2", 4096, 2, 0.16, kStrict},
                                         NeedlesRow{"seed3", 4096, 3, 0.16, kStrict},
                                         NeedlesRow{"two_segments", 16384, 4, 0.15, kStrict}),
                         [](const auto& row) { return row.param.name; });

// The life of an engine's request (FAULTS row 31): whatever happens to it, the answers stay.
INSTANTIATE_TEST_SUITE_P(
    Lives, NeedlesTest,
    testing::Values(
        NeedlesRow{"preempted_at_17", 4096, 11, kShortRatio, {.preempt_at = 17}},
        // Before the first step: re-admitted with nothing decoded.
        NeedlesRow{"preempted_at_0", 4096, 12, kShortRatio, {.preempt_at = 0}},
        NeedlesRow{"aborted_in_prefill", 4096, 13, kShortRatio, {.abort_prefill = true}},
        NeedlesRow{"forked", 4096, 14, kShortRatio, {.fork = true}},
        NeedlesRow{"speculating", 4096, 15, kShortRatio, {.truncate = true}},
        NeedlesRow{"all_at_once",
                   9216,
                   16,
                   kMiddleRatio,
                   {.abort_prefill = true, .preempt_at = 5, .fork = true, .truncate = true}},
        // Prefill token ranges that share no boundary with segments or blocks.
        NeedlesRow{"odd_chunks", 9216, 17, kMiddleRatio, {.chunk_tokens = 777, .chunk_layers = 3}},
        // The portable wave-buffer path: this process attends over what the daemon staged.
        NeedlesRow{"staged", 4096, 18, kShortRatio, {.staged = true}},
        NeedlesRow{
            "staged_and_speculating", 4096, 19, kShortRatio, {.staged = true, .truncate = true}}),
    [](const auto& row) { return row.param.name; });

// The binary as people run it: its last line is one JSON object, its exit code says found or not.
TEST(MockDecoderBinary, PrintsOneJsonObjectLast) {
  auto process = Process::Start({.argv = {ProgramPath("mock_decoder"), "--mode=compare",
                                          "--tokens=4096", "--needles=32", "--json"}});
  ASSERT_OK(process.status());
  EXPECT_EQ((*process)->WaitForExit(seconds(100)), 0) << (*process)->Output();
  ASSERT_TRUE((*process)->WaitForOutput("}\n", seconds(5))) << (*process)->Output();
  std::string output = (*process)->Output();
  ASSERT_FALSE(output.empty());
  ASSERT_EQ(output.back(), '\n');
  output.pop_back();
  const std::string last = output.substr(output.rfind('\n') + 1);
  EXPECT_EQ(last.front(), '{');
  EXPECT_EQ(last.back(), '}');
  EXPECT_NE(last.find("\"needles_found\": 32, \"needles_asked\": 32"), std::string::npos) << last;
}

// Long work shows how far it is: on a terminal, and nowhere else.
TEST(MockDecoderBinary, DrawsProgressOnATerminal) {
  const std::vector<std::string> arguments = {ProgramPath("mock_decoder"), "--mode=wavekv",
                                              "--tokens=4096", "--needles=4"};
  const ProgramResult drawn = RunOnTerminal(arguments, {}, "", "", seconds(100));
  EXPECT_EQ(drawn.exit_code, 0) << drawn.out;
  for (const std::string work : {"insert", "index"}) {
    EXPECT_THAT(drawn.out, testing::HasSubstr(work + " │"));
  }
  EXPECT_THAT(drawn.out, testing::HasSubstr("│ 4,096 of 4,096 tokens"));
  EXPECT_THAT(RunProgram(arguments, {}, seconds(100)).err, testing::Not(testing::HasSubstr("│")));
}

// Where there is no GPU it says so, before long work begins, and what does without one.
TEST(MockDecoderBinary, OffersTheHostWithoutAGpu) {
  for (const std::string path : {"--mode=compare", "--staged"}) {
    // Neither a driver of the tests' nor a device of the machine's.
    const ProgramResult refused =
        RunProgram({ProgramPath("mock_decoder"), "--backend=cuda", "--tokens=131072", path},
                   {"LD_LIBRARY_PATH=", "CUDA_VISIBLE_DEVICES="}, seconds(100));
    EXPECT_EQ(refused.exit_code, 2) << refused.out;
    EXPECT_THAT(refused.err, testing::HasSubstr("--backend=host")) << path;
  }
}

// Without a daemon it says so and does not pretend.
TEST(MockDecoderBinary, FailsWithoutADaemon) {
  auto process =
      Process::Start({.argv = {ProgramPath("mock_decoder"), "--mode=wavekv", "--tokens=512",
                               "--needles=4", "--address=unix:/nonexistent/wavekvd.sock"}});
  ASSERT_OK(process.status());
  EXPECT_EQ((*process)->WaitForExit(seconds(100)), 2) << (*process)->Output();
  EXPECT_TRUE((*process)->WaitForOutput("/nonexistent/wavekvd.sock", seconds(5)))
      << (*process)->Output();
}

}  // namespace
}  // namespace wavekv::integration
