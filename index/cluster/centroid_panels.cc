#include "index/cluster/centroid_panels.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "index/simd/assign.h"
#include "storage/base/dtype.h"

namespace wavekv {
namespace {

constexpr int kPowerIterations = 3;

void Gather(std::span<const float> centroids, std::span<const uint16_t> order, uint32_t dim,
            std::span<float> rows) {
  for (size_t i = 0; i < order.size(); ++i) {
    std::copy_n(&centroids[size_t{order[i]} * dim], dim, &rows[i * dim]);
  }
}

// sums [dim] = sum over rows of weights[r] * rows[r].
void WeightedSum(const simd::Kernels& kernels, std::span<const float> rows, uint32_t dim,
                 std::span<const float> weights, std::vector<float>* sums) {
  sums->assign(dim, 0.0f);
  kernels.accumulate_rows(DType::kF32, rows.data(), weights.size(), dim, weights.data(),
                          weights.size(), 1, sums->data(), dim);
}

// Not kernels.dot_rows: here every level must get the same bits, or levels would make other groups.
float Dot(const float* a, const float* b, uint32_t dim) {
  constexpr uint32_t kWidth = 16;
  float sums[kWidth] = {};
  uint32_t j = 0;
  for (; j + kWidth <= dim; j += kWidth) {
    for (uint32_t lane = 0; lane < kWidth; ++lane) sums[lane] += a[j + lane] * b[j + lane];
  }
  for (; j < dim; ++j) sums[0] += a[j] * b[j];
  for (uint32_t lane = 1; lane < kWidth; ++lane) sums[0] += sums[lane];
  return sums[0];
}

// Projections of the rows on the direction in which they differ most (power iteration, started from
// the first of them).
std::vector<float> Project(const simd::Kernels& kernels, std::span<const float> rows,
                           uint32_t row_count, uint32_t dim) {
  std::vector<float> direction(rows.begin(), rows.begin() + dim), projections(row_count);
  for (int iteration = 0; iteration <= kPowerIterations; ++iteration) {
    for (uint32_t r = 0; r < row_count; ++r) {
      projections[r] = Dot(&rows[size_t{r} * dim], direction.data(), dim);
    }
    if (iteration == kPowerIterations) break;
    WeightedSum(kernels, rows, dim, projections, &direction);
    double squares = 0;
    for (const float x : direction) squares += double{x} * x;
    if (!(squares > 0)) break;
    const auto factor = static_cast<float>(1 / std::sqrt(squares));
    kernels.scale(direction.data(), dim, factor);
  }
  return projections;
}

void Halve(const simd::Kernels& kernels, std::span<const float> centroids, uint32_t dim,
           std::span<uint16_t> order, std::vector<float>* scratch) {
  const auto count = static_cast<uint32_t>(order.size());
  if (count <= simd::kPanelCentroids) return;
  const std::span<float> rows = std::span(*scratch).first(size_t{count} * dim);
  Gather(centroids, order, dim, rows);
  std::vector<float> mean;
  WeightedSum(kernels, rows, dim, std::vector<float>(count, -1.0f / static_cast<float>(count)),
              &mean);
  for (uint32_t r = 0; r < count; ++r) {
    float* row = &rows[size_t{r} * dim];
    for (uint32_t j = 0; j < dim; ++j) row[j] += mean[j];
  }
  const std::vector<float> projections = Project(kernels, rows, count, dim);
  std::vector<std::pair<float, uint16_t>> sorted(count);
  for (uint32_t r = 0; r < count; ++r) sorted[r] = {projections[r], order[r]};
  std::sort(sorted.begin(), sorted.end());
  for (uint32_t r = 0; r < count; ++r) order[r] = sorted[r].second;
  // Whole panels on the left; a partial one ends up last of all.
  const size_t left = (simd::PanelCount(count) + 1) / 2 * simd::kPanelCentroids;
  Halve(kernels, centroids, dim, order.first(left), scratch);
  Halve(kernels, centroids, dim, order.subspan(left), scratch);
}

}  // namespace

std::vector<uint16_t> OrderByLikeness(const simd::Kernels& kernels,
                                      std::span<const float> centroids, uint32_t centroid_count,
                                      uint32_t dim) {
  std::vector<uint16_t> order(centroid_count);
  std::iota(order.begin(), order.end(), uint16_t{0});
  std::vector<float> scratch(size_t{centroid_count} * dim);
  Halve(kernels, centroids, dim, order, &scratch);
  return order;
}

std::vector<uint16_t> NearestPanels(const simd::Kernels& kernels, std::span<const float> centroids,
                                    uint32_t centroid_count, uint32_t dim,
                                    std::span<const float> panels, uint32_t panel_count,
                                    uint32_t list_count) {
  std::vector<float> maxima(size_t{centroid_count} * panel_count);
  kernels.panel_maxima(centroids.data(), centroid_count, dim, panels.data(), panel_count,
                       maxima.data());
  std::vector<uint16_t> lists(size_t{centroid_count} * list_count), all(panel_count);
  for (uint32_t c = 0; c < centroid_count; ++c) {
    const float* row = &maxima[size_t{c} * panel_count];
    std::iota(all.begin(), all.end(), uint16_t{0});
    const auto nearer = [row](uint16_t a, uint16_t b) {
      return row[a] != row[b] ? row[a] > row[b] : a < b;
    };
    std::nth_element(all.begin(), all.begin() + (list_count - 1), all.end(), nearer);
    std::sort(all.begin(), all.begin() + list_count);
    std::copy_n(all.begin(), list_count, lists.begin() + size_t{c} * list_count);
  }
  return lists;
}

}  // namespace wavekv
