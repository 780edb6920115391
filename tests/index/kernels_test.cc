// Every level of index/simd against the same float64 oracle.
#include "index/simd/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "index/segment.h"
#include "tests/index/oracle.h"

namespace wavekv::simd {
namespace {

using test::Gaussian;
using test::NewRandom;
using test::StoredRows;

// 32 to 256 as models have them, and one below, one above a vector of every width.
constexpr uint32_t kDims[] = {32, 33, 47, 63, 64, 65, 80, 96, 128, 129, 192, 255, 256};
constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr float kInf = std::numeric_limits<float>::infinity();

class KernelsTest : public testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels_ = *GetParam();
};

TEST_P(KernelsTest, DotRowsMatchesDouble) {
  auto random = NewRandom(1);
  for (const DType dtype : kDTypes) {
    for (const uint32_t dim : kDims) {
      for (const uint32_t group : {1u, 2u, 3u, 4u, 7u, 16u}) {
        const uint32_t rows = 1 + static_cast<uint32_t>(random() % 23);
        std::vector<float> queries = Gaussian(random, size_t{group} * dim);
        // Some heads' queries as a bf16 model gives them: a level may have a loop for those.
        for (uint32_t at = 0; at < queries.size(); ++at) {
          if (at / dim % 5 < group % 4 + 1) queries[at] = BF16ToFloat(FloatToBF16(queries[at]));
        }
        const StoredRows keys = test::Store(dtype, dim, Gaussian(random, size_t{rows} * dim));
        const uint32_t stride = rows + 3;
        std::vector<float> scores(size_t{group} * stride, 7);
        kernels_.dot_rows(dtype, queries.data(), group, dim, keys.bytes.data(), rows, 0.125f,
                          scores.data(), stride);
        for (uint32_t g = 0; g < group; ++g) {
          const std::vector<double> exact = test::ExactScores(
              std::span<const float>(queries).subspan(size_t{g} * dim, dim), keys.floats, 0.125);
          for (uint32_t r = 0; r < rows; ++r) {
            // At most dim roundings of sums whose terms are of size 1: 256 * 2^-24 * |q||k| / 8.
            ASSERT_NEAR(scores[g * stride + r], exact[r], 1e-5 * dim)
                << DTypeName(dtype) << " dim " << dim << " group " << group << " row " << r;
          }
          for (uint32_t r = rows; r < stride; ++r) ASSERT_EQ(scores[g * stride + r], 7);
        }
      }
    }
  }
}

// Whatever piece of the rows a call gets, and whatever other heads: a score has the same bits.
TEST_P(KernelsTest, DotRowsDoesNotDependOnHowRowsAreCut) {
  auto random = NewRandom(2);
  for (const DType dtype : kDTypes) {
    for (const uint32_t dim : {33u, 64u, 128u}) {
      const uint32_t rows = 29, group = 7;
      std::vector<float> queries = Gaussian(random, size_t{group} * dim);
      for (uint32_t at = 0; at < 5 * dim; ++at) {
        if (at / dim != 2) queries[at] = BF16ToFloat(FloatToBF16(queries[at]));
      }
      const StoredRows keys = test::Store(dtype, dim, Gaussian(random, size_t{rows} * dim));
      std::vector<float> whole(group * rows), parts(group * rows);
      kernels_.dot_rows(dtype, queries.data(), group, dim, keys.bytes.data(), rows, 0.3f,
                        whole.data(), rows);
      for (uint32_t g = 0; g < group; ++g) {
        for (uint32_t r = 0; r < rows;) {
          const uint32_t count = std::min<uint32_t>(rows - r, 1 + random() % 6);
          kernels_.dot_rows(dtype, &queries[g * dim], 1, dim,
                            keys.bytes.data() + r * dim * DTypeBytes(dtype), count, 0.3f,
                            &parts[g * rows + r], rows);
          r += count;
        }
      }
      EXPECT_EQ(whole, parts) << DTypeName(dtype) << " dim " << dim;
    }
  }
}

TEST_P(KernelsTest, DotRowsStaysFiniteWhenProductsOverflow) {
  const uint32_t dim = 64;
  std::vector<float> query(dim, 1e30f), keys(3 * dim, 1e30f);
  for (uint32_t j = 0; j < dim; ++j) keys[dim + j] = -1e30f;
  for (uint32_t j = 0; j < dim; ++j) keys[2 * dim + j] = j % 2 == 0 ? 1e30f : -1e30f;
  std::vector<float> scores(3);
  kernels_.dot_rows(DType::kF32, query.data(), 1, dim, keys.data(), 3, 1, scores.data(), 3);
  EXPECT_EQ(scores[0], kScoreMax);
  EXPECT_EQ(scores[1], -kScoreMax);
  EXPECT_LE(std::abs(scores[2]), kScoreMax);
}

TEST_P(KernelsTest, AccumulateRowsMatchesDouble) {
  auto random = NewRandom(3);
  for (const DType dtype : kDTypes) {
    for (const uint32_t dim : kDims) {
      for (const uint32_t group : {1u, 2u, 3u, 5u, 8u}) {
        const uint32_t rows = static_cast<uint32_t>(random() % 40);
        const uint32_t weight_stride = rows + 1, sum_stride = dim + 2;
        const std::vector<float> weights = Gaussian(random, size_t{group} * weight_stride);
        const StoredRows values = test::Store(dtype, dim, Gaussian(random, size_t{rows} * dim));
        const std::vector<float> before = Gaussian(random, size_t{group} * sum_stride);
        std::vector<float> sums = before;
        kernels_.accumulate_rows(dtype, values.bytes.data(), rows, dim, weights.data(),
                                 weight_stride, group, sums.data(), sum_stride);
        for (uint32_t g = 0; g < group; ++g) {
          for (uint32_t j = 0; j < sum_stride; ++j) {
            double exact = before[g * sum_stride + j];
            for (uint32_t r = 0; j < dim && r < rows; ++r) {
              exact +=
                  static_cast<double>(weights[g * weight_stride + r]) * values.floats[r * dim + j];
            }
            // 40 roundings of sums below about 40: 40 * 40 * 2^-24.
            ASSERT_NEAR(sums[g * sum_stride + j], exact, 1e-4)
                << DTypeName(dtype) << " dim " << dim << " group " << group << " column " << j;
          }
        }
      }
    }
  }
}

TEST_P(KernelsTest, AccumulateRowsDoesNotDependOnHowRowsAreCut) {
  auto random = NewRandom(4);
  const uint32_t rows = 37, dim = 80, group = 6;
  const StoredRows values = test::Store(DType::kBF16, dim, Gaussian(random, rows * dim));
  const std::vector<float> weights = Gaussian(random, group * rows);
  std::vector<float> whole(group * dim, 0), parts(group * dim, 0);
  kernels_.accumulate_rows(DType::kBF16, values.bytes.data(), rows, dim, weights.data(), rows,
                           group, whole.data(), dim);
  for (uint32_t r = 0; r < rows;) {
    const uint32_t count = std::min<uint32_t>(rows - r, 1 + random() % 9);
    kernels_.accumulate_rows(DType::kBF16, values.bytes.data() + r * dim * 2, count, dim,
                             &weights[r], rows, group, parts.data(), dim);
    r += count;
  }
  EXPECT_EQ(whole, parts);
}

TEST_P(KernelsTest, ExpSumMatchesDouble) {
  auto random = NewRandom(5);
  for (const size_t n : {0u, 1u, 3u, 4u, 7u, 8u, 16u, 31u, 128u, 1000u}) {
    std::vector<float> x = Gaussian(random, n, 30);
    const float top = kernels_.max(x.data(), n);
    if (n == 0) {
      EXPECT_EQ(top, -kInf);
      EXPECT_EQ(kernels_.exp_sum(x.data(), 0, 0), 0);
      continue;
    }
    ASSERT_EQ(top, *std::max_element(x.begin(), x.end()));
    std::vector<double> exact;
    // The difference is taken in float, as in the loop: its rounding is the caller's to judge.
    for (const float value : x) exact.push_back(std::exp(static_cast<double>(value - top)));
    const float sum = kernels_.exp_sum(x.data(), n, top);
    EXPECT_NEAR(sum, std::accumulate(exact.begin(), exact.end(), 0.0), 1e-5 * sum);
    for (size_t i = 0; i < n; ++i) ASSERT_NEAR(x[i], exact[i], 1e-6 * exact[i] + 1e-37);
  }
}

TEST_P(KernelsTest, ExpSumOfFarBelowIsZero) {
  std::vector<float> x = {-kScoreMax, 0, -200, kScoreMax - 2 * kScoreMax, -90};
  EXPECT_NEAR(kernels_.exp_sum(x.data(), x.size(), 0), 1, 1e-6);
  EXPECT_EQ(x[0], 0);
  EXPECT_EQ(x[2], 0);
  EXPECT_EQ(x[3], 0);
}

TEST_P(KernelsTest, ElementwiseLoops) {
  auto random = NewRandom(6);
  for (const size_t n : {0u, 1u, 5u, 16u, 33u, 100u}) {
    const std::vector<float> a = Gaussian(random, n), b = Gaussian(random, n);
    std::vector<float> scaled = a;
    kernels_.scale(scaled.data(), n, 0.75f);
    double product = 0;
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(scaled[i], a[i] * 0.75f);
      product += static_cast<double>(a[i]) * b[i];
    }
    EXPECT_NEAR(kernels_.dot(a.data(), b.data(), n), product, 1e-5);
    const float thresholds[] = {-0.5f, 0, 0.7f};
    float sums[] = {1, 2, 3};
    kernels_.sums_below(a.data(), n, thresholds, 3, sums);
    for (int k = 0; k < 3; ++k) {
      double below = k + 1;
      for (const float x : a) below += x < thresholds[k] ? x : 0;
      EXPECT_NEAR(sums[k], below, 1e-4);
    }
  }
}

TEST_P(KernelsTest, CombineMatchesDouble) {
  auto random = NewRandom(11);
  for (const size_t n : {1u, 15u, 16u, 40u}) {
    for (const size_t group : {1u, 3u, 8u}) {
      const size_t stride = n + 2;
      const std::vector<float> x = Gaussian(random, group * stride),
                               factors = Gaussian(random, group);
      std::vector<float> mask(n), out(n + 1, 7);
      for (float& m : mask) m = static_cast<float>(random() % 2);
      kernels_.combine(x.data(), stride, group, factors.data(), mask.data(), n, out.data());
      for (size_t i = 0; i < n; ++i) {
        double exact = 0;
        for (size_t g = 0; g < group; ++g) exact += double{factors[g]} * x[g * stride + i];
        ASSERT_NEAR(out[i], mask[i] * exact, 1e-5);
      }
      EXPECT_EQ(out[n], 7);
    }
  }
}

// Codes in panels, as SegmentHead keeps them, from [count, dim] signed ones.
std::vector<uint8_t> Panels(const std::vector<int>& codes, uint32_t count, uint32_t dim) {
  std::vector<uint8_t> panels(KeyCodeCount(count, dim), kKeyCodeZero);
  for (uint32_t c = 0; c < count; ++c) {
    for (uint32_t j = 0; j < dim; ++j) {
      panels[KeyCodeIndex(c, j, dim)] = static_cast<uint8_t>(codes[c * dim + j] + kKeyCodeZero);
    }
  }
  return panels;
}

TEST_P(KernelsTest, DotCodesIsExact) {
  auto random = NewRandom(12);
  for (const uint32_t dim : kDims) {
    for (const uint32_t group : {1u, 2u, 3u, 4u, 7u, 16u}) {
      const uint32_t rows = 1 + static_cast<uint32_t>(random() % 90), stride = rows + 3;
      // In one round every factor is the largest there is, where sums are nearest to overflow.
      const bool largest = random() % 3 == 0;
      std::vector<int> codes(rows * dim);
      for (int& code : codes) code = largest ? -127 : static_cast<int>(random() % 255) - 127;
      const std::vector<float> queries =
          largest ? std::vector<float>(group * dim, 2.5f) : Gaussian(random, group * dim);
      QueryCodes query;
      query.Assign(queries, dim);
      const std::vector<float> scales = Gaussian(random, rows), bases = Gaussian(random, group);
      std::vector<float> factors;
      for (const float step : query.steps) factors.push_back(step * 0.125f);
      std::vector<float> scores(group * stride, 7);
      kernels_.dot_panels(query, Panels(codes, rows, dim).data(), rows, scales.data(), bases.data(),
                          factors.data(), scores.data(), stride);
      for (uint32_t g = 0; g < group; ++g) {
        for (uint32_t r = 0; r < rows; ++r) {
          int64_t sum = 0;
          for (uint32_t j = 0; j < dim; ++j) {
            sum += int64_t{query.codes[g * query.padded_dim + j]} * codes[r * dim + j];
          }
          const double part = double{factors[g]} * scales[r] * static_cast<double>(sum);
          // Nothing but the roundings of the factors, the sum as a float and the result.
          ASSERT_NEAR(scores[g * stride + r], bases[g] + part,
                      4e-7 * (std::abs(part) + std::abs(bases[g])))
              << "dim " << dim << " group " << group << " row " << r;
        }
        for (uint32_t r = rows; r < stride; ++r) ASSERT_EQ(scores[g * stride + r], 7);
      }
    }
  }
}

TEST_P(KernelsTest, DotCodesStaysFinite) {
  const uint32_t dim = 32;
  QueryCodes query;
  query.Assign(std::vector<float>(dim, 3e38f), dim);
  std::vector<int> codes(3 * dim, 0);
  for (uint32_t j = 0; j < dim; ++j) codes[dim + j] = 127, codes[2 * dim + j] = -127;
  const std::vector<float> scales(3, 1e30f), base = {0}, factor = {1e34f};
  std::vector<float> scores(3);
  kernels_.dot_panels(query, Panels(codes, 3, dim).data(), 3, scales.data(), base.data(),
                      factor.data(), scores.data(), 3);
  EXPECT_EQ(scores[0], 0);
  EXPECT_EQ(scores[1], kScoreMax);
  EXPECT_EQ(scores[2], -kScoreMax);
}

TEST_P(KernelsTest, EstimatedLogMassesMatchDouble) {
  auto random = NewRandom(14);
  for (const size_t n : {0u, 1u, 15u, 16u, 17u, 50u}) {
    for (const size_t group : {1u, 3u, 4u, 9u}) {
      const size_t stride = n + 1;
      const std::vector<float> scores = Gaussian(random, group * stride, 10);
      std::vector<float> spreads, log_sizes, reaches, found(group * stride, 7), tops(group, -9);
      for (size_t i = 0; i < n; ++i) {
        // From none to far beyond what a cluster can hold.
        spreads.push_back(i % 5 == 0 ? 0.0f : std::exp2(static_cast<float>(random() % 12) - 6.0f));
        log_sizes.push_back(std::log(static_cast<float>(1 + random() % 32)));
      }
      for (size_t g = 0; g < group; ++g) reaches.push_back(g == 1 ? 0.0f : 2.5f / (1 + g));
      kernels_.estimate_log_masses(scores.data(), stride, group, spreads.data(), log_sizes.data(),
                                   reaches.data(), n, found.data(), tops.data());
      for (size_t g = 0; g < group; ++g) {
        float top = -9;
        for (size_t i = 0; i < n; ++i) {
          const double variance = double{reaches[g]} * spreads[i], deviation = std::sqrt(variance),
                       reached = std::sqrt(2.0 * log_sizes[i]);
          const double gain =
              deviation <= reached ? variance / 2 : deviation * reached - log_sizes[i];
          const double exact =
              scores[g * stride + i] + log_sizes[i] + std::min(gain, deviation) / 2;
          ASSERT_NEAR(found[g * stride + i], exact, 1e-5 * (std::abs(exact) + 10));
          top = std::max(top, found[g * stride + i]);
        }
        EXPECT_EQ(tops[g], top);
        EXPECT_EQ(found[g * stride + n], 7);
      }
    }
  }
  // The gain of a cluster of one is nothing, whatever its spread.
  const float score = 3, spread = 100, log_size = 0, reach = 1;
  float found = 0, top = -kInf;
  kernels_.estimate_log_masses(&score, 1, 1, &spread, &log_size, &reach, 1, &found, &top);
  EXPECT_EQ(found, 3);
  EXPECT_EQ(top, 3);
}

TEST_P(KernelsTest, ListReachingListsWhatReachesAnyThreshold) {
  auto random = NewRandom(17);
  for (const size_t n : {0u, 1u, 15u, 16u, 17u, 100u}) {
    for (const size_t group : {1u, 2u, 5u}) {
      const size_t stride = n + 3;
      std::vector<float> x = Gaussian(random, group * stride);
      // None, some, all; a number that equals the threshold reaches it.
      for (const float threshold : {9.0f, 1.5f, -9.0f}) {
        std::vector<float> thresholds(group, threshold);
        thresholds.back() += 0.5f;
        if (n > 0) x[random() % n] = thresholds[0];
        std::vector<uint32_t> expected, found(n + 1, 7);
        for (size_t i = 0; i < n; ++i) {
          bool reaches = false;
          for (size_t g = 0; g < group; ++g) reaches |= x[g * stride + i] >= thresholds[g];
          if (reaches) expected.push_back(static_cast<uint32_t>(i));
        }
        const size_t count =
            kernels_.list_reaching(x.data(), stride, group, thresholds.data(), n, found.data());
        EXPECT_EQ(found[n], 7u);
        found.resize(count);
        EXPECT_EQ(found, expected);
      }
    }
  }
}

TEST_P(KernelsTest, RankClustersMatchesDouble) {
  auto random = NewRandom(15);
  for (const size_t n : {1u, 15u, 16u, 50u}) {
    for (const size_t group : {1u, 4u, 5u}) {
      const size_t stride = n + 1;
      std::vector<float> weights(group * stride), key_spreads(n), value_spreads(n);
      const auto fill = [&](std::vector<float>& x) {
        for (float& value : x) value = std::abs(Gaussian(random, 1)[0]);
      };
      for (auto* x : {&weights, &key_spreads, &value_spreads}) fill(*x);
      std::vector<float> share(group), rank(group), reach(group);
      for (auto* x : {&share, &rank, &reach}) fill(*x);
      reach[0] = 1e30f;
      key_spreads[0] = 0;
      std::vector<float> mass_share(n), ranks(n);
      kernels_.rank_clusters({share, rank, reach}, weights.data(), stride, key_spreads.data(),
                             value_spreads.data(), n, mass_share.data(), ranks.data());
      for (size_t i = 0; i < n; ++i) {
        double exact_share = 0, exact_rank = 0;
        for (size_t g = 0; g < group; ++g) {
          const double weight = weights[g * stride + i];
          exact_share += share[g] * weight;
          const double v = double{reach[g]} * key_spreads[i];
          exact_rank += rank[g] * weight * value_spreads[i] * test::TailFactor(std::min(v, 64.0)) *
                        std::sqrt(1 - std::exp(-v));
        }
        ASSERT_NEAR(mass_share[i], exact_share, 1e-5 * exact_share);
        ASSERT_NEAR(ranks[i], exact_rank, 0.02 * exact_rank + 1e-12);
      }
      EXPECT_EQ(ranks[0], 0) << "without spread there is nothing to misjudge";
    }
  }
}

TEST_P(KernelsTest, ToFloatIsExactForEveryFinite16BitNumber) {
  std::vector<uint16_t> all(1 << 16);
  std::iota(all.begin(), all.end(), 0);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    std::vector<float> found(all.size()), expected(all.size());
    kernels_.to_float(dtype, all.data(), all.size(), found.data());
    ConvertToFloat(dtype, all.data(), all.size(), expected.data());
    for (size_t i = 0; i < all.size(); ++i) {
      if (!std::isfinite(expected[i])) continue;
      ASSERT_EQ(found[i], expected[i]) << DTypeName(dtype) << " bits " << i;
    }
  }
  // And no element beyond the last is touched, whatever the count.
  for (size_t n = 0; n < 40; ++n) {
    std::vector<float> found(41, -5);
    kernels_.to_float(DType::kBF16, all.data(), n, found.data());
    for (size_t i = n; i < found.size(); ++i) ASSERT_EQ(found[i], -5);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryLevel, KernelsTest, testing::ValuesIn(AvailableKernels()),
                         [](const auto& info) {
                           std::string name = info.param->isa;
                           std::erase(name, '_');
                           return name;
                         });

TEST(KernelLevels, ScalarIsAlwaysThereAndWiderVectorsComeFirst) {
  const auto levels = AvailableKernels();
  ASSERT_FALSE(levels.empty());
  EXPECT_TRUE(FindKernels("scalar").ok());
  for (size_t i = 1; i < levels.size(); ++i) {
    EXPECT_GE(levels[i - 1]->float_lanes, levels[i]->float_lanes);
  }
}

TEST(KernelLevels, ScoresOfCodesAgreeBitForBitWithFusedMultiplyAdd) {
  auto random = NewRandom(16);
  const uint32_t dim = 100, rows = 77, group = 5;
  std::vector<int> codes(rows * dim);
  for (int& code : codes) code = static_cast<int>(random() % 255) - 127;
  const std::vector<uint8_t> panels = Panels(codes, rows, dim);
  QueryCodes query;
  query.Assign(Gaussian(random, group * dim), dim);
  const std::vector<float> scales = Gaussian(random, rows), bases = Gaussian(random, group);
  std::vector<std::vector<float>> found;
  for (const Kernels* level : AvailableKernels()) {
    if (level->isa == std::string_view("scalar")) continue;
    found.emplace_back(group * rows);
    level->dot_panels(query, panels.data(), rows, scales.data(), bases.data(), query.steps.data(),
                      found.back().data(), rows);
    EXPECT_EQ(found.back(), found.front()) << level->isa;
  }
}

TEST(QueryCodes, AreTheQueryToHalfAStep) {
  auto random = NewRandom(17);
  const uint32_t dim = 33, group = 3;
  std::vector<float> queries = Gaussian(random, group * dim);
  std::fill_n(queries.begin() + dim, dim, 0.0f);
  QueryCodes codes;
  codes.Assign(queries, dim);
  EXPECT_EQ(codes.padded_dim, 36u);
  EXPECT_EQ(codes.steps[1], 0);
  for (uint32_t g = 0; g < group; ++g) {
    int32_t sum = 0;
    for (uint32_t j = 0; j < codes.padded_dim; ++j) {
      const size_t at = g * codes.padded_dim + j;
      ASSERT_EQ(codes.codes[at], 256 * codes.high[at] + codes.low[at]);
      const float exact = j < dim ? queries[g * dim + j] : 0;
      ASSERT_NEAR(codes.steps[g] * codes.codes[at], exact, codes.steps[g] * 0.5001);
      sum += codes.codes[at];
    }
    EXPECT_EQ(codes.sums[g], sum);
  }
}

TEST(KernelLevels, UnknownNameIsRefusedWithTheListOfLevels) {
  const auto found = FindKernels("mmx");
  EXPECT_EQ(found.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(found.status().message()),
              testing::AllOf(testing::HasSubstr("'mmx'"), testing::HasSubstr("scalar")));
}

// ActiveKernels decides once in a process, so each choice is asked of a process of its own.
TEST(KernelLevelsDeathTest, EnvironmentForcesTheLevelThatRuns) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (const Kernels* level : AvailableKernels()) {
    EXPECT_EXIT(
        {
          setenv("WAVEKV_ISA", level->isa, 1);
          std::exit(std::string(ActiveKernels().isa) == level->isa ? 0 : 1);
        },
        testing::ExitedWithCode(0), "");
  }
  EXPECT_DEATH(
      {
        setenv("WAVEKV_ISA", "mmx", 1);
        ActiveKernels();
      },
      "WAVEKV_ISA is 'mmx', expected one of");
}

}  // namespace
}  // namespace wavekv::simd
