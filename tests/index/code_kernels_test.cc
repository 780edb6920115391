// The loops over rows of codes: 8-bit means and 4-bit sketches.
#include <cmath>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "index/simd/kernels.h"
#include "index/token_sketch.h"
#include "tests/index/oracle.h"

namespace wavekv::simd {
namespace {

using test::Gaussian;
using test::NewRandom;

// Whole vectors of every level and their rests, odd numbers, the largest.
constexpr uint32_t kDims[] = {1, 31, 32, 33, 64, 80, 127, 128, 129, 256, 300};
constexpr uint32_t kGroups[] = {1, 2, 3, 4, 5, 9};

class CodeKernelsTest : public testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels_ = *GetParam();
};

// A sketch of random rows.
RowCodes Sketch(std::mt19937_64& random, uint32_t rows, uint32_t dim) {
  RowCodes codes;
  for (uint32_t r = 0; r < rows; ++r) AppendCodes(Gaussian(random, dim).data(), dim, &codes);
  return codes;
}

int CodeOf(const RowCodes& codes, uint32_t row, uint32_t column, uint32_t dim) {
  const size_t half = SketchRowBytes(dim);
  const uint8_t byte = codes.codes[row * half + column % half];
  return column < half ? byte & 15 : byte >> 4;
}

// bf16 queries have loops of their own on some levels, and a group may hold both kinds.
TEST_P(CodeKernelsTest, CodeDotsMatchDouble) {
  auto random = NewRandom(1);
  for (const uint32_t dim : kDims) {
    for (const uint32_t group : kGroups) {
      for (const bool bf16 : {true, false}) {
        const uint32_t rows = static_cast<uint32_t>(random() % 20), stride = rows + 2;
        const RowCodes codes = Sketch(random, rows, dim);
        std::vector<float> queries = Gaussian(random, group * dim);
        for (size_t i = 0; i < queries.size(); ++i) {
          if (bf16 || i / dim == 1) queries[i] = BF16ToFloat(FloatToBF16(queries[i]));
        }
        const std::vector<float> before = Gaussian(random, group * stride);
        std::vector<float> scores = before;
        kernels_.add_code_dots(queries.data(), group, dim, codes.codes.data(), codes.steps.data(),
                               rows, 0.3f, scores.data(), stride);
        for (uint32_t g = 0; g < group; ++g) {
          for (uint32_t r = 0; r < stride; ++r) {
            double exact = before[g * stride + r], magnitude = std::abs(exact);
            for (uint32_t j = 0; r < rows && j < dim; ++j) {
              const double part = 0.3f * double{queries[g * dim + j]} *
                                  BF16ToFloat(codes.steps[r]) * (CodeOf(codes, r, j, dim) - 7.5);
              exact += part;
              magnitude += std::abs(part);
            }
            // dim roundings of sums that are mostly far below their magnitude.
            ASSERT_NEAR(scores[g * stride + r], exact, 1e-6 * magnitude)
                << "dim " << dim << " group " << group << " row " << r << " of " << rows;
          }
        }
      }
    }
  }
}

// What a head scores does not depend on the others of its group, nor on how rows are cut.
TEST_P(CodeKernelsTest, CodeDotsDependOnTheirNumbersAlone) {
  auto random = NewRandom(2);
  const uint32_t dim = 96, group = 6, rows = 23;
  const RowCodes codes = Sketch(random, rows, dim);
  std::vector<float> queries = Gaussian(random, group * dim);
  for (size_t i = 0; i < queries.size(); ++i) {
    if (i / dim % 2 == 0) queries[i] = BF16ToFloat(FloatToBF16(queries[i]));
  }
  std::vector<float> whole(group * rows, 1), parts = whole;
  kernels_.add_code_dots(queries.data(), group, dim, codes.codes.data(), codes.steps.data(), rows,
                         1, whole.data(), rows);
  for (uint32_t g = 0; g < group; ++g) {
    for (uint32_t r = 0; r < rows;) {
      const uint32_t count = std::min<uint32_t>(rows - r, 1 + random() % 7);
      kernels_.add_code_dots(&queries[g * dim], 1, dim, &codes.codes[r * SketchRowBytes(dim)],
                             &codes.steps[r], count, 1, &parts[g * rows + r], rows);
      r += count;
    }
  }
  EXPECT_EQ(whole, parts);
}

TEST_P(CodeKernelsTest, CodeDotsStayFinite) {
  const uint32_t dim = 64;
  RowCodes codes;
  for (const float x : {1e30f, -1e30f}) {
    AppendCodes(std::vector<float>(dim, x).data(), dim, &codes);
  }
  const std::vector<float> queries(dim, 1e30f);
  std::vector<float> scores(2, 0);
  kernels_.add_code_dots(queries.data(), 1, dim, codes.codes.data(), codes.steps.data(), 2, 1,
                         scores.data(), 2);
  EXPECT_EQ(scores[0], kScoreMax);
  EXPECT_EQ(scores[1], -kScoreMax);
}

// A list of some of `count` rows, in any order, some of them more than once.
std::vector<uint32_t> SomeRows(std::mt19937_64& random, uint32_t count) {
  std::vector<uint32_t> rows(random() % 100);
  for (uint32_t& row : rows) row = static_cast<uint32_t>(random() % count);
  return rows;
}

TEST_P(CodeKernelsTest, AccumulateMeansMatchesDouble) {
  auto random = NewRandom(3);
  const uint32_t count = 50;
  for (const uint32_t dim : kDims) {
    for (const uint32_t group : kGroups) {
      std::vector<int8_t> codes(count * dim);
      for (int8_t& code : codes) code = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
      const std::vector<uint32_t> rows = SomeRows(random, count);
      const uint32_t weight_stride = count + 1, sum_stride = dim + 2;
      const std::vector<float> weights = Gaussian(random, group * weight_stride);
      std::vector<float> sums(group * sum_stride, 1);
      kernels_.accumulate_means(codes.data(), rows.data(), rows.size(), dim, weights.data(),
                                weight_stride, group, sums.data(), sum_stride);
      for (uint32_t g = 0; g < group; ++g) {
        for (uint32_t j = 0; j < sum_stride; ++j) {
          double exact = 1, magnitude = 1;
          for (size_t i = 0; j < dim && i < rows.size(); ++i) {
            const double part =
                double{weights[g * weight_stride + rows[i]]} * codes[rows[i] * dim + j];
            exact += part;
            magnitude += std::abs(part);
          }
          ASSERT_NEAR(sums[g * sum_stride + j], exact, 2e-6 * magnitude)
              << "dim " << dim << " group " << group << " column " << j;
        }
      }
    }
  }
}

TEST_P(CodeKernelsTest, AccumulateCodesMatchesDouble) {
  auto random = NewRandom(4);
  const uint32_t count = 40;
  for (const uint32_t dim : kDims) {
    for (const uint32_t group : kGroups) {
      const RowCodes codes = Sketch(random, count, dim);
      const std::vector<uint32_t> rows = SomeRows(random, count);
      const uint32_t weight_stride = count + 1, sum_stride = dim + 2;
      const std::vector<float> weights = Gaussian(random, group * weight_stride);
      std::vector<float> sums(group * sum_stride, 1);
      kernels_.accumulate_codes(codes.codes.data(), rows.data(), rows.size(), dim, weights.data(),
                                weight_stride, group, sums.data(), sum_stride);
      for (uint32_t g = 0; g < group; ++g) {
        for (uint32_t j = 0; j < sum_stride; ++j) {
          double exact = 1, magnitude = 1;
          for (size_t i = 0; j < dim && i < rows.size(); ++i) {
            const double part = double{weights[g * weight_stride + rows[i]]} *
                                (CodeOf(codes, rows[i], j, dim) - 7.5);
            exact += part;
            magnitude += std::abs(part);
          }
          ASSERT_NEAR(sums[g * sum_stride + j], exact, 2e-6 * magnitude)
              << "dim " << dim << " group " << group << " column " << j;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryLevel, CodeKernelsTest, testing::ValuesIn(AvailableKernels()),
                         [](const auto& info) {
                           std::string name = info.param->isa;
                           std::erase(name, '_');
                           return name;
                         });

}  // namespace
}  // namespace wavekv::simd
