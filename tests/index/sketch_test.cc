#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "gtest/gtest.h"
#include "index/backend/cpu_backend.h"
#include "index/simd/kernels.h"
#include "index/token_sketch.h"
#include "index/zone/cluster_mass.h"
#include "tests/index/oracle.h"

namespace wavekv {
namespace {

// What row `r` of `rows` stands for, in double.
std::vector<double> Decode(const RowCodes& rows, size_t r, uint32_t dim) {
  const size_t row_bytes = SketchRowBytes(dim);
  std::vector<double> decoded(dim);
  for (uint32_t j = 0; j < dim; ++j) {
    const uint8_t byte = rows.codes[r * row_bytes + j % row_bytes];
    const int code = j < row_bytes ? byte & 15 : byte >> 4;
    decoded[j] = double{BF16ToFloat(rows.steps[r])} * (code - 7.5);
  }
  return decoded;
}

struct CodeRow {
  std::string why;
  uint32_t dim;
  double deviation;
};

TEST(TokenSketch, ErrorIsHalfAStepAtMost) {
  const CodeRow rows[] = {
      {"a usual head", 64, 1},
      {"an odd dim: the last byte holds one code", 33, 1},
      {"the smallest dim", 1, 1},
      {"large numbers", 128, 1e37},
      {"small ones", 128, 1e-30},
      {"too small for a step", 128, 1e-40},
      {"all equal to their mean", 128, 0},
  };
  std::mt19937_64 random = test::NewRandom(1);
  for (const CodeRow& row : rows) {
    SCOPED_TRACE(row.why);
    RowCodes codes;
    for (int r = 0; r < 20; ++r) {
      const std::vector<float> exact = test::Gaussian(random, row.dim, row.deviation);
      const double error = AppendCodes(exact.data(), row.dim, &codes);
      const std::vector<double> decoded = Decode(codes, r, row.dim);
      double squared = 0, largest = 0;
      for (uint32_t j = 0; j < row.dim; ++j) {
        largest = std::max(largest, std::fabs(double{exact[j]}));
        squared += std::pow(exact[j] - decoded[j], 2);
      }
      // The step is at most a bf16 (2^-7) above largest / 7.5; tiny rows count as their mean.
      const double step = largest / 7.5 * (1 + 0x1p-7);
      for (uint32_t j = 0; j < row.dim; ++j) {
        EXPECT_LE(std::fabs(exact[j] - decoded[j]), std::max(0.501 * step, 2e-37)) << j;
      }
      EXPECT_NEAR(error, std::sqrt(squared), 1e-12 * error);
    }
    EXPECT_EQ(codes.codes.size(), 20 * SketchRowBytes(row.dim));
    EXPECT_EQ(codes.steps.size(), 20u);
  }
}

struct Shape {
  std::string name;
  uint32_t group_size, key_dim, value_dim;
  DType dtype;
};

struct Level {
  const simd::Kernels* kernels;
  Shape shape;
};

class SketchTest : public testing::TestWithParam<Level> {
 protected:
  const Shape& shape() const { return GetParam().shape; }

  void Make(uint32_t tokens, double query_length, uint64_t stream) {
    std::mt19937_64 random = test::NewRandom(stream);
    keys_ = test::Store(shape().dtype, shape().key_dim,
                        test::TopicKeys(random, tokens, shape().key_dim, 40, 4, 0.5));
    values_ = test::Store(shape().dtype, shape().value_dim,
                          test::Gaussian(random, size_t{tokens} * shape().value_dim));
    queries_ = test::Gaussian(random, size_t{shape().group_size} * shape().key_dim, query_length);
    backend_ = CreateCpuBackend(*GetParam().kernels);
    built_ = test::Build(*backend_, keys_, values_);
    segment_ = {&built_.head};
    query_ = {queries_,          shape().group_size, shape().key_dim,
              shape().value_dim, shape().dtype,      1 / std::sqrt(float(shape().key_dim))};
    const std::vector<float> no_steady(shape().group_size, -INFINITY);
    ASSERT_TRUE(backend_->RankClusters(segment_, query_, no_steady, &scores_).ok());
  }

  std::span<const float> Query(uint32_t g) const {
    return std::span<const float>(queries_).subspan(size_t{g} * shape().key_dim, shape().key_dim);
  }

  // Scores of the rows of `clusters` in double, by their keys or by their sketched keys.
  std::vector<double> RowScores(const std::vector<uint32_t>& clusters, uint32_t g, bool sketched) {
    std::vector<double> scores;
    const SegmentHead& head = built_.head;
    for (const uint32_t c : clusters) {
      for (uint32_t row = head.first_row[c]; row < head.first_row[c + 1]; ++row) {
        const float* key = &keys_.floats[size_t{head.row_to_offset[row]} * shape().key_dim];
        double dot = 0;
        if (!sketched) {
          for (uint32_t j = 0; j < shape().key_dim; ++j) dot += double{Query(g)[j]} * key[j];
          scores.push_back(dot * query_.scale);
          continue;
        }
        const std::vector<double> difference = Decode(head.sketch.keys, row, shape().key_dim);
        for (uint32_t j = 0; j < shape().key_dim; ++j) dot += Query(g)[j] * difference[j];
        scores.push_back(dot * query_.scale +
                         scores_.logits[size_t{g} * scores_.cluster_count + c]);
      }
    }
    return scores;
  }

  // The output of query head with these scores of the clusters' rows.
  std::vector<double> ReplayValues(const std::vector<uint32_t>& clusters,
                                   const std::vector<double>& scores,
                                   const std::vector<bool>& heavy, double lse) const {
    const SegmentHead& head = built_.head;
    const uint32_t dim = shape().value_dim;
    std::vector<double> out(dim, 0);
    size_t i = 0;
    for (const uint32_t c : clusters) {
      const std::vector<double> mean = StoredValueMean(head, c);
      for (uint32_t row = head.first_row[c]; row < head.first_row[c + 1]; ++row, ++i) {
        const std::vector<double> difference = Decode(head.sketch.values, row, dim);
        for (uint32_t j = 0; j < dim; ++j) {
          const double sketched = mean[j] + difference[j];
          const double exact = values_.floats[size_t{head.row_to_offset[row]} * dim + j];
          out[j] += std::exp(scores[i] - lse) * (heavy[i] ? exact : sketched);
        }
      }
    }
    return out;
  }

  test::StoredRows keys_, values_;
  std::vector<float> queries_;
  std::unique_ptr<ComputeBackend> backend_;
  test::BuiltSegment built_;
  std::vector<const SegmentHead*> segment_;
  GroupQuery query_;
  ClusterScores scores_;
};

// Against a replay in double of what the sketch says: scores and values from codes, those of rows
// that hold 0.2 % of some head's mass from the payload. The replay uses every row's codes; those
// that are left out may drop a share of 1e-4 each.
TEST_P(SketchTest, EqualsItsReplay) {
  for (const double length : {1.5, 8.0}) {
    SCOPED_TRACE(length);
    Make(1000, length, 2);
    std::vector<uint32_t> clusters;
    const uint32_t stride = length > 2 ? 1 : 2;
    for (uint32_t c = 0; c < built_.head.cluster_count; c += stride) clusters.push_back(c);
    EstimatedAttention found;
    ASSERT_TRUE(backend_->SketchClusters(segment_, clusters, query_, scores_, false, &found).ok());
    EXPECT_TRUE(found.lse_lower.empty());

    std::vector<std::vector<double>> scores, exact;
    for (uint32_t g = 0; g < shape().group_size; ++g) {
      scores.push_back(RowScores(clusters, g, true));
      exact.push_back(RowScores(clusters, g, false));
    }
    const size_t rows = scores[0].size();
    size_t heavy_count = 0;
    std::vector<bool> heavy(rows, false);
    bool unsure = false;  // A share so near to 0.2 % that rounding decides.
    for (uint32_t g = 0; g < shape().group_size; ++g) {
      const double whole = std::max<double>(scores_.total_lse[g], test::LogSumExp(scores[g]));
      for (size_t r = 0; r < rows; ++r) {
        const double share = std::exp(scores[g][r] - whole);
        heavy[r] = heavy[r] || share > 0.002;
        unsure |= std::fabs(share - 0.002) < 5e-6;
      }
    }
    for (size_t r = 0; r < rows; ++r) {
      heavy_count += heavy[r] ? 1 : 0;
      for (uint32_t g = 0; heavy[r] && g < shape().group_size; ++g) scores[g][r] = exact[g][r];
    }
    if (unsure) continue;
    if (length > 2) {
      EXPECT_GT(heavy_count, 0u);
    }
    const size_t row_bytes = (shape().key_dim + shape().value_dim) * DTypeBytes(shape().dtype);
    const size_t key_bytes = rows * (SketchRowBytes(shape().key_dim) + 2);
    const size_t least =
        key_bytes + heavy_count * row_bytes + clusters.size() * (shape().value_dim + sizeof(float));
    EXPECT_GE(found.bytes_read, least);
    EXPECT_LE(found.bytes_read,
              least + (rows - heavy_count) * (SketchRowBytes(shape().value_dim) + 2));
    for (uint32_t g = 0; g < shape().group_size; ++g) {
      const double lse = test::LogSumExp(scores[g]);
      EXPECT_NEAR(found.attention.lse[g], lse, 1e-4 * (1 + std::fabs(lse)));
      // What is negligible in the whole may be much of a zone that holds little of it.
      const double whole = std::max<double>(scores_.total_lse[g], lse);
      const double dropped = 2e-4 * static_cast<double>(rows) * std::exp(whole - lse);
      const std::vector<double> expected = ReplayValues(clusters, scores[g], heavy, lse);
      EXPECT_LT(
          test::RelativeError(
              std::span(found.attention.out).subspan(g * shape().value_dim, shape().value_dim),
              expected),
          dropped + 1e-3);
    }
  }
}

// Token by token is nearer to the truth than a summary, and the bounds hold it.
TEST_P(SketchTest, IsNearerThanTheSummaryAndBounded) {
  double sketch_error = 0, summary_error = 0;
  for (const double length : {0.3, 1.5, 6.0}) {
    Make(1500, length, 3);
    std::vector<uint32_t> clusters(built_.head.cluster_count);
    std::iota(clusters.begin(), clusters.end(), 0u);
    EstimatedAttention sketched, summary;
    ASSERT_TRUE(
        backend_->SketchClusters(segment_, clusters, query_, scores_, true, &sketched).ok());
    ASSERT_TRUE(
        backend_->EstimateClusters(segment_, clusters, query_, scores_, true, &summary).ok());
    for (uint32_t g = 0; g < shape().group_size; ++g) {
      const double truth = test::LogSumExp(RowScores(clusters, g, false));
      sketch_error += std::fabs(sketched.attention.lse[g] - truth);
      summary_error += std::fabs(summary.attention.lse[g] - truth);
      EXPECT_LE(sketched.lse_lower[g], truth);
      EXPECT_GE(sketched.lse_upper[g], truth);
      EXPECT_GE(sketched.lse_lower[g], summary.lse_lower[g] - 1e-3);
      EXPECT_LE(sketched.lse_upper[g], summary.lse_upper[g] + 1e-3);
    }
  }
  EXPECT_LT(sketch_error, 0.5 * summary_error);
}

TEST_P(SketchTest, BoundsHoldForKeysOfAnySize) {
  for (const double length : {1e-6, 30.0, 1000.0}) {
    Make(300, length, 4);
    std::vector<uint32_t> clusters(built_.head.cluster_count);
    std::iota(clusters.begin(), clusters.end(), 0u);
    EstimatedAttention found;
    ASSERT_TRUE(backend_->SketchClusters(segment_, clusters, query_, scores_, true, &found).ok());
    for (uint32_t g = 0; g < shape().group_size; ++g) {
      const double truth = test::LogSumExp(RowScores(clusters, g, false));
      EXPECT_LE(found.lse_lower[g], truth) << length;
      EXPECT_GE(found.lse_upper[g], truth) << length;
    }
  }
}

TEST_P(SketchTest, OverNothingIsNothing) {
  Make(300, 1, 5);
  EstimatedAttention found;
  ASSERT_TRUE(backend_->SketchClusters(segment_, {}, query_, scores_, true, &found).ok());
  for (uint32_t g = 0; g < shape().group_size; ++g) {
    EXPECT_EQ(found.attention.lse[g], -INFINITY);
    EXPECT_EQ(found.lse_lower[g], -INFINITY);
    EXPECT_EQ(found.lse_upper[g], -INFINITY);
  }
  for (const float x : found.attention.out) EXPECT_EQ(x, 0);
  EXPECT_EQ(found.bytes_read, 0u);
}

TEST_P(SketchTest, PartsMerge) {
  // What is heavy depends on what else is known. Here a row's scores deviate by 0.22 from a mean
  // share of 0.05 %, so that none is near the 0.2 % from which its key is read.
  Make(2000, 0.2, 6);
  std::vector<uint32_t> all(built_.head.cluster_count);
  std::iota(all.begin(), all.end(), 0u);
  const std::vector<uint32_t> first(all.begin(), all.begin() + 10);
  const std::vector<uint32_t> rest(all.begin() + 10, all.end());
  EstimatedAttention whole, a, b;
  ASSERT_TRUE(backend_->SketchClusters(segment_, all, query_, scores_, true, &whole).ok());
  ASSERT_TRUE(backend_->SketchClusters(segment_, first, query_, scores_, true, &a).ok());
  ASSERT_TRUE(backend_->SketchClusters(segment_, rest, query_, scores_, true, &b).ok());
  MergeEstimated(b, &a);
  EXPECT_EQ(a.bytes_read > 0, true);
  for (uint32_t g = 0; g < shape().group_size; ++g) {
    EXPECT_NEAR(a.attention.lse[g], whole.attention.lse[g], 1e-4);
    EXPECT_NEAR(a.lse_lower[g], whole.lse_lower[g], 2e-3);
    EXPECT_NEAR(a.lse_upper[g], whole.lse_upper[g], 2e-3);
  }
}

std::vector<Level> Levels() {
  const Shape shapes[] = {
      {"Group3", 3, 64, 64, DType::kF16},    {"Group4", 4, 128, 128, DType::kBF16},
      {"Mha", 1, 64, 128, DType::kF32},      {"Group7OddDims", 7, 33, 47, DType::kBF16},
      {"Smallest", 2, 32, 32, DType::kBF16},
  };
  std::vector<Level> levels;
  for (const simd::Kernels* kernels : simd::AvailableKernels()) {
    for (const Shape& shape : shapes) levels.push_back({kernels, shape});
  }
  return levels;
}

INSTANTIATE_TEST_SUITE_P(EveryLevel, SketchTest, testing::ValuesIn(Levels()), [](const auto& info) {
  return std::string(info.param.kernels->isa) + info.param.shape.name;
});

}  // namespace
}  // namespace wavekv
