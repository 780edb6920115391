// Planted needles over a resident region: by the kernels where WAVEKV_TEST_GPU=1 says that there is
// a GPU, otherwise by the same steps in C++ over the fake driver.
#include <cstdio>
#include <string>

#include "gmock/gmock.h"
#include "tests/gpu/driver/use_fake_cuda.h"
#include "tests/integration/device_engine.h"
#include "tests/integration/resident_engine.h"
#include "tests/integration/sdk_test.h"
#include "tests/mock_decoder/modes.h"

namespace wavekv::integration {
namespace {

struct NeedlesRow {
  std::string name;
  uint64_t token_count;
  uint64_t seed;
  mock::SdkRunOptions sdk = {};
  DType dtype = DType::kBF16;
};

void PrintTo(const NeedlesRow& row, std::ostream* out) { *out << row.name; }

mock::RunOptions OptionsOf(const NeedlesRow& row) {
  mock::RunOptions options;
  options.world.token_count = row.token_count;
  options.world.needle_count = 32;
  options.world.model.seed = row.seed;
  options.world.model.dtype = row.dtype;
  options.sdk = row.sdk;
  options.backend = "cuda";
  options.make_engine = UseFakeCuda() ? MakeReferenceEngine : MakeDeviceEngine;
  return options;
}

class ResidentNeedlesTest : public testing::TestWithParam<NeedlesRow> {};

TEST_P(ResidentNeedlesTest, AllAreFound) {
  const absl::StatusOr<mock::Report> report = mock::RunMode(OptionsOf(GetParam()));
  ASSERT_OK(report.status());
  SCOPED_TRACE(report->ToText());
  std::printf("%s\n", report->ToJson().c_str());
  EXPECT_EQ(report->path, "resident");
  EXPECT_EQ(report->backend, "cuda");
  EXPECT_EQ(report->needles_found_exact, 32u);
  EXPECT_EQ(report->needles_found, 32u);
  // By retrieval, not by a steady zone that is larger than it says.
  EXPECT_EQ(report->needles_found_steady_only, report->needles_planted_steady);
  EXPECT_LT(*report->needles_planted_steady, 16u);
  EXPECT_LE(*report->max_rel_error, 0.05);
  EXPECT_TRUE(report->hit_ratio.has_value()) << "no step asked for a block";
}

INSTANTIATE_TEST_SUITE_P(
    Contexts, ResidentNeedlesTest,
    testing::Values(
        NeedlesRow{"4096", 4096, 21}, NeedlesRow{"32768", 32768, 22},
        NeedlesRow{"131072", 131072, 23}, NeedlesRow{"4096_f16", 4096, 24, {}, DType::kF16},
        NeedlesRow{"strict", 4096, 25, {.retrieval_ratio = 0.03, .sketch_clusters = 0}},
        // Its sequence goes while it is attached; the engine takes another.
        NeedlesRow{"preempted", 4096, 26, {.preempt_at = 9}},
        NeedlesRow{"speculating", 4096, 27, {.truncate = true}},
        NeedlesRow{
            "all_at_once", 9216, 28, {.abort_prefill = true, .preempt_at = 5, .truncate = true}}),
    [](const auto& row) { return row.param.name; });

TEST(ResidentRun, RefusesWhatItCannotDo) {
  const auto report = mock::RunMode(OptionsOf({"forked", 4096, 1, {.fork = true}}));
  EXPECT_EQ(report.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(report.status().message()), testing::HasSubstr("--fork"));
}

}  // namespace
}  // namespace wavekv::integration
