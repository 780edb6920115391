// Every level of index/simd against the same float64 oracle.
#include "index/simd/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>

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
        const std::vector<float> queries = Gaussian(random, size_t{group} * dim);
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
      const std::vector<float> queries = Gaussian(random, size_t{group} * dim);
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
    std::vector<float> sum(n), scaled = a, added = b;
    kernels_.add(a.data(), b.data(), n, sum.data());
    kernels_.scale(scaled.data(), n, 0.75f);
    kernels_.multiply_add(0.75f, a.data(), n, added.data());
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(sum[i], a[i] + b[i]);
      ASSERT_EQ(scaled[i], a[i] * 0.75f);
      ASSERT_NEAR(added[i], b[i] + 0.75 * a[i], 1e-6);
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

TEST_P(KernelsTest, SquaredDistancesMatchDouble) {
  auto random = NewRandom(7);
  for (const uint32_t dim : kDims) {
    const std::vector<float> rows = Gaussian(random, 5 * dim), center = Gaussian(random, dim);
    std::vector<float> found(5);
    kernels_.squared_distances(rows.data(), 5, dim, center.data(), found.data());
    for (uint32_t r = 0; r < 5; ++r) {
      double exact = 0;
      for (uint32_t j = 0; j < dim; ++j) {
        const double difference = static_cast<double>(rows[r * dim + j]) - center[j];
        exact += difference * difference;
      }
      EXPECT_NEAR(found[r], exact, 1e-5 * exact);
    }
  }
}

TEST_P(KernelsTest, NearestByDotFindsTheLargest) {
  auto random = NewRandom(8);
  for (const uint32_t dim : {32u, 33u, 64u, 128u}) {
    for (const uint32_t centroid_count : {1u, 2u, 31u, 32u, 33u, 100u}) {
      const uint32_t point_count = 1 + static_cast<uint32_t>(random() % 200);
      const std::vector<float> points = Gaussian(random, size_t{point_count} * dim);
      const std::vector<float> centroids = Gaussian(random, size_t{centroid_count} * dim);
      std::vector<float> scratch(NearestScratchFloats(centroid_count, dim));
      std::vector<int64_t> labels(point_count);
      std::vector<float> dots(point_count);
      kernels_.nearest_by_dot(points.data(), point_count, centroids.data(), centroid_count, dim,
                              scratch.data(), labels.data(), dots.data());
      for (uint32_t p = 0; p < point_count; ++p) {
        const std::vector<double> exact = test::ExactScores(
            std::span<const float>(points).subspan(size_t{p} * dim, dim), centroids, 1);
        const double best = *std::max_element(exact.begin(), exact.end());
        ASSERT_GE(labels[p], 0);
        ASSERT_LT(labels[p], centroid_count);
        ASSERT_NEAR(dots[p], best, 1e-4);
        ASSERT_NEAR(exact[labels[p]], best, 1e-4);
      }
    }
  }
}

TEST_P(KernelsTest, NearestByDotPrefersTheLowestIndexAmongEquals) {
  auto random = NewRandom(9);
  const uint32_t dim = 48;
  const std::vector<float> points = Gaussian(random, 50 * dim);
  const std::vector<float> one = Gaussian(random, dim);
  std::vector<float> centroids;
  for (int c = 0; c < 77; ++c) centroids.insert(centroids.end(), one.begin(), one.end());
  std::vector<float> scratch(NearestScratchFloats(77, dim));
  std::vector<int64_t> labels(50, -1);
  std::vector<float> dots(50);
  kernels_.nearest_by_dot(points.data(), 50, centroids.data(), 77, dim, scratch.data(),
                          labels.data(), dots.data());
  EXPECT_THAT(labels, testing::Each(0));
}

INSTANTIATE_TEST_SUITE_P(EveryLevel, KernelsTest, testing::ValuesIn(AvailableKernels()),
                         [](const auto& info) {
                           std::string name = info.param->isa;
                           std::erase(name, '-');
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

TEST(KernelLevels, LevelsWithFusedMultiplyAddAgreeBitForBitOnTheNearest) {
  const auto avx2 = FindKernels("avx2"), avx512 = FindKernels("avx512");
  if (!avx2.ok() || !avx512.ok()) GTEST_SKIP() << "this processor has not both levels";
  auto random = NewRandom(10);
  const uint32_t dim = 100, points = 333, centroids = 45;
  const std::vector<float> x = Gaussian(random, points * dim),
                           c = Gaussian(random, centroids * dim);
  std::vector<float> scratch(NearestScratchFloats(centroids, dim));
  std::vector<int64_t> labels[2];
  std::vector<float> dots[2];
  for (int i = 0; i < 2; ++i) {
    labels[i].resize(points);
    dots[i].resize(points);
    (i == 0 ? *avx2 : *avx512)
        ->nearest_by_dot(x.data(), points, c.data(), centroids, dim, scratch.data(),
                         labels[i].data(), dots[i].data());
  }
  EXPECT_EQ(labels[0], labels[1]);
  EXPECT_EQ(dots[0], dots[1]);
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
