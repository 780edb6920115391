// The model of what attention costs, against what was measured, and what must hold of it anywhere.
#include "client/gpu/attention_choice.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>

#include "index/zone/select_zones.h"
#include "tests/shm/seed.h"

namespace wavekv::client {
namespace {

AttentionProblem Llama8B(uint32_t batch, uint64_t tokens, double hit_ratio) {
  return {.batch = batch,
          .tokens = tokens,
          .kv_head_count = 8,
          .head_dim = 128,
          .element_bytes = 2,
          .hit_ratio = hit_ratio};
}

struct Measured {
  uint32_t batch;
  uint64_t tokens;
  double hit_ratio;
  double full_us;
  double wave_us;
};

// bench/results/h200/gpu-attend.json: all its rows, forced hit ratios and the cache's own.
constexpr Measured kMeasured[] = {
    {1, 32768, 1.000, 37.7, 37.8},      {1, 32768, 0.950, 37.7, 44.6},
    {1, 32768, 0.897, 37.7, 55.9},      {1, 32768, 0.800, 37.7, 73.3},
    {1, 32768, 0.559, 37.7, 117.9},     {1, 32768, 0.948, 37.7, 50.6},
    {4, 32768, 1.000, 124.3, 53.7},     {4, 32768, 0.949, 124.3, 86.5},
    {4, 32768, 0.897, 124.3, 115.3},    {4, 32768, 0.795, 124.3, 188.4},
    {4, 32768, 0.555, 124.3, 368.1},    {4, 32768, 0.948, 124.3, 97.0},
    {8, 32768, 1.000, 239.2, 72.9},     {8, 32768, 0.951, 239.2, 135.6},
    {8, 32768, 0.903, 239.2, 192.5},    {8, 32768, 0.801, 239.2, 339.0},
    {8, 32768, 0.556, 239.2, 697.7},    {8, 32768, 0.948, 239.2, 152.0},
    {16, 32768, 1.000, 464.8, 119.6},   {16, 32768, 0.951, 464.8, 197.8},
    {16, 32768, 0.899, 464.8, 344.4},   {16, 32768, 0.801, 464.8, 635.3},
    {16, 32768, 0.554, 464.8, 1356.4},  {16, 32768, 0.948, 464.8, 235.2},
    {1, 122880, 1.000, 118.2, 46.1},    {1, 122880, 0.952, 118.2, 52.2},
    {1, 122880, 0.910, 118.2, 62.7},    {1, 122880, 0.801, 118.2, 81.3},
    {1, 122880, 0.908, 118.2, 63.1},    {1, 122880, 0.939, 118.2, 59.5},
    {4, 122880, 1.000, 437.9, 73.9},    {4, 122880, 0.949, 437.9, 95.0},
    {4, 122880, 0.905, 437.9, 124.3},   {4, 122880, 0.800, 437.9, 200.4},
    {4, 122880, 0.908, 437.9, 124.6},   {4, 122880, 0.939, 437.9, 108.1},
    {8, 122880, 1.000, 869.5, 111.1},   {8, 122880, 0.950, 869.5, 158.6},
    {8, 122880, 0.900, 869.5, 218.6},   {8, 122880, 0.798, 869.5, 368.9},
    {8, 122880, 0.909, 869.5, 215.5},   {8, 122880, 0.938, 869.5, 183.2},
    {16, 122880, 1.000, 1720.3, 198.8}, {16, 122880, 0.951, 1720.3, 295.9},
    {16, 122880, 0.901, 1720.3, 399.9}, {16, 122880, 0.801, 1720.3, 697.9},
    {16, 122880, 0.909, 1720.3, 392.3}, {16, 122880, 0.940, 1720.3, 301.1},
    {1, 1048576, 1.000, 925.0, 126.6},  {1, 1048576, 0.951, 925.0, 164.1},
    {1, 1048576, 0.901, 925.0, 226.1},  {1, 1048576, 0.801, 925.0, 366.6},
    {1, 1048576, 0.911, 925.0, 214.2},  {1, 1048576, 0.939, 925.0, 171.7},
};

TEST(AttentionChoiceTest, ChoosesAsWasMeasured) {
  for (const Measured& row : kMeasured) {
    const auto cost = EstimateAttention(Llama8B(row.batch, row.tokens, row.hit_ratio));
    ASSERT_TRUE(cost.ok()) << cost.status();
    const double apart = std::max(row.full_us, row.wave_us) / std::min(row.full_us, row.wave_us);
    if (apart > 1.15) {
      EXPECT_EQ(cost->full_wins(), row.full_us < row.wave_us)
          << row.batch << " x " << row.tokens << " at " << row.hit_ratio << ": measured "
          << row.full_us << " and " << row.wave_us << ", estimated " << cost->full_us << " and "
          << cost->wave_us;
    }
    EXPECT_NEAR(cost->full_us / row.full_us, 1, 0.07) << row.batch << " x " << row.tokens;
    EXPECT_GT(cost->wave_us / row.wave_us, 0.75) << row.batch << " x " << row.tokens;
    EXPECT_LT(cost->wave_us / row.wave_us, 1.13) << row.batch << " x " << row.tokens;
  }
}

class Random {
 public:
  uint64_t Count(uint64_t least, uint64_t most) {
    return std::uniform_int_distribution<uint64_t>(least, most)(engine_);
  }
  double Real(double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(engine_);
  }
  AttentionProblem Problem() {
    return {.batch = static_cast<uint32_t>(Count(1, 64)),
            .tokens = Count(0, 4 << 20),
            .kv_head_count = static_cast<uint32_t>(Count(1, 32)),
            .head_dim = static_cast<uint32_t>(64 << Count(0, 2)),
            .element_bytes = static_cast<uint32_t>(2 << Count(0, 1)),
            .hit_ratio = Real(0, 1)};
  }
  DeviceRates Rates() { return {Real(1e11, 2e13), Real(5e9, 9e11)}; }

 private:
  std::mt19937_64 engine_{shm::FreshSeed()};
};

// More work never costs less, on either side, and a better device never more.
TEST(AttentionChoiceTest, IsMonotone) {
  Random random;
  for (int i = 0; i < 20'000; ++i) {
    const AttentionProblem problem = random.Problem();
    const DeviceRates rates = random.Rates();
    const auto base = EstimateAttention(problem, rates);
    ASSERT_TRUE(base.ok()) << base.status();

    AttentionProblem longer = problem;
    longer.tokens += random.Count(0, 1 << 20);
    AttentionProblem wider = problem;
    wider.batch += static_cast<uint32_t>(random.Count(0, 16));
    AttentionProblem colder = problem;
    colder.hit_ratio *= random.Real(0, 1);
    for (const AttentionProblem& harder : {longer, wider, colder}) {
      const auto cost = EstimateAttention(harder, rates);
      ASSERT_TRUE(cost.ok()) << cost.status();
      EXPECT_GE(cost->full_us, base->full_us);
      EXPECT_GE(cost->wave_us, base->wave_us);
    }
    EXPECT_EQ(EstimateAttention(colder, rates)->full_us, base->full_us);

    DeviceRates faster = rates;
    faster.hbm_bytes_per_s *= random.Real(1, 4);
    faster.bus_bytes_per_s *= random.Real(1, 4);
    const auto cost = EstimateAttention(problem, faster);
    ASSERT_TRUE(cost.ok()) << cost.status();
    EXPECT_LE(cost->full_us, base->full_us);
    EXPECT_LE(cost->wave_us, base->wave_us);
  }
}

TEST(AttentionChoiceTest, TheLimitIsWhereTheResidentPathFirstWins) {
  Random random;
  for (int i = 0; i < 300; ++i) {
    AttentionProblem problem = random.Problem();
    const DeviceRates rates = random.Rates();
    const uint64_t limit = random.Count(0, 1 << 20);
    const auto most = FullAttentionTokensMax(problem, limit, rates);
    ASSERT_TRUE(most.ok()) << most.status();
    ASSERT_LE(*most, limit);
    ASSERT_TRUE(*most == limit || *most % 1024 == 0) << *most;
    for (uint64_t tokens = 1024; tokens <= *most; tokens += 1024) {
      problem.tokens = tokens;
      ASSERT_TRUE(EstimateAttention(problem, rates)->full_wins()) << tokens;
    }
    problem.tokens = std::min(*most + 1024, limit);
    if (*most < limit) {
      ASSERT_FALSE(EstimateAttention(problem, rates)->full_wins());
    }
  }
}

// The SDK, which sees nothing of the daemon's index, has its own copy of what the default budget
// retrieves on a GPU. Where only the bus takes time, the cost is the missed rows.
TEST(AttentionChoiceTest, RetrievesWhatTheDaemonDoes) {
  const DeviceRates slow_bus = {.hbm_bytes_per_s = 1e30, .bus_bytes_per_s = 1};
  const auto rows = [&](uint32_t clusters) {
    const uint64_t tokens = uint64_t{15} * clusters;
    const double all_us = EstimateAttention(Llama8B(1, tokens, 0), slow_bus)->wave_us;
    const double none_us = EstimateAttention(Llama8B(1, tokens, 1), slow_bus)->wave_us;
    return (all_us - none_us) * 1e-6 / (8 * 2 * 128 * 2);
  };
  constexpr uint32_t kManyClusters = 1'000'000;
  const auto retrieved = [](uint32_t clusters) {
    return UnsketchedRetrievalCount(ZoneBudget(), /*sketch=*/true, clusters);
  };
  const double rows_per_cluster = rows(kManyClusters) / retrieved(kManyClusters);
  EXPECT_NEAR(rows_per_cluster, 18, 0.01);
  for (const uint32_t clusters : {1'000u, 9'000u, 10'000u, 100'000u}) {
    EXPECT_NEAR(rows(clusters) / rows_per_cluster, retrieved(clusters), 1) << clusters;
  }
}

// What an engine that says nothing gets, for the shape that was measured.
TEST(AttentionChoiceTest, SmallerBatchesStayLonger) {
  uint64_t before = 1 << 20;
  for (const uint32_t batch : {1u, 4u, 8u, 16u, 64u}) {
    const auto most = FullAttentionTokensMax(Llama8B(batch, 0, 0.9), 1 << 20);
    ASSERT_TRUE(most.ok()) << most.status();
    EXPECT_LT(*most, before);
    EXPECT_GT(*most, 8192u);
    before = *most;
  }
}

TEST(AttentionChoiceTest, RefusesWhatIsNoProblem) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  struct {
    AttentionProblem problem;
    DeviceRates rates;
    const char* field;
  } const kRefused[] = {
      {Llama8B(0, 9, 1), {}, "batch"},
      {{.batch = 1, .tokens = 9, .kv_head_count = 0, .head_dim = 64}, {}, "kv_head_count"},
      {{.batch = 1, .tokens = 9, .kv_head_count = 1, .head_dim = 0}, {}, "head_dim"},
      {{.kv_head_count = 1, .head_dim = 64, .element_bytes = 0}, {}, "element_bytes"},
      {Llama8B(1, 9, 1.01), {}, "hit_ratio"},
      {Llama8B(1, 9, nan), {}, "hit_ratio"},
      {Llama8B(1, 9, 1), {.hbm_bytes_per_s = 0}, "hbm_bytes_per_s"},
      {Llama8B(1, 9, 1), {.bus_bytes_per_s = nan}, "bus_bytes_per_s"},
  };
  for (const auto& row : kRefused) {
    for (const absl::Status& status :
         {EstimateAttention(row.problem, row.rates).status(),
          FullAttentionTokensMax(row.problem, 9, row.rates).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(status.message().find(row.field), 0u) << status;
    }
  }
  EXPECT_FALSE(FullAttentionTokensMax(Llama8B(1, 0, 1), uint64_t{1} << 33).ok());
}

}  // namespace
}  // namespace wavekv::client
