// The assignment loops of k-means at every level against float64, and the order of the panels.
#include "index/simd/assign.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "index/cluster/centroid_panels.h"
#include "index/simd/kernels.h"
#include "tests/index/oracle.h"

namespace wavekv::simd {
namespace {

using test::Gaussian;
using test::NewRandom;

// Points and centroids of N(0, 1), packed in an order of their own.
struct Scene {
  Scene(std::mt19937_64& random, uint32_t point_count, uint32_t centroid_count, uint32_t scene_dim)
      : dim(scene_dim),
        points(Gaussian(random, size_t{point_count} * dim)),
        centroids(Gaussian(random, size_t{centroid_count} * dim)),
        order(centroid_count),
        panel_list(PanelCount(centroid_count)) {
    std::iota(order.begin(), order.end(), uint16_t{0});
    std::shuffle(order.begin(), order.end(), random);
    std::iota(panel_list.begin(), panel_list.end(), uint16_t{0});
    Pack();
  }

  uint32_t point_count() const { return static_cast<uint32_t>(points.size()) / dim; }

  void Pack() {
    panels.resize(PanelCount(order.size()) * kPanelCentroids * dim);
    PackPanels(centroids.data(), order, dim, panels.data());
  }

  void Assign(const Kernels& kernels) {
    slots.assign(point_count(), 77777);
    dots.assign(point_count(), -77);
    kernels.nearest_in_panels(points.data(), point_count(), dim, panels.data(), panel_list.data(),
                              panel_list.size(), slots.data(), dots.data());
  }

  // Dot products of a point with every centroid, by slot.
  std::vector<double> Exact(uint32_t point) const {
    const std::vector<double> by_centroid = test::ExactScores(
        std::span<const float>(points).subspan(size_t{point} * dim, dim), centroids, 1);
    std::vector<double> by_slot;
    for (const uint16_t c : order) by_slot.push_back(by_centroid[c]);
    return by_slot;
  }

  // What float rounding may do to a dot product of N(0, 1) vectors: dim terms, each rounded to half
  // a unit in the last place of a partial sum, which stays under 6 * sqrt(dim); errors are
  // independent, so their sum stays under 8 times its deviation. A centroid whose product is within
  // twice that of the largest is as good an answer.
  double Tolerance() const {
    const double partial = 6 * std::sqrt(dim), one = partial * 0x1p-24;
    return 8 * std::sqrt(dim) * one;
  }

  uint32_t dim;
  std::vector<float> points, centroids, panels, dots;
  std::vector<uint16_t> order, panel_list;
  std::vector<uint32_t> slots;
};

class AssignTest : public testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels_ = *GetParam();
};

TEST_P(AssignTest, FindsTheLargestDotProduct) {
  auto random = NewRandom(40);
  struct Row {
    uint32_t points, centroids, dim;
  };
  const Row rows[] = {
      {1, 1, 32},       // The smallest.
      {1, 16, 64},      // One whole panel.
      {7, 17, 33},      // A partial panel; a dim that fills no vector.
      {96, 32, 64},     // Exactly one chunk of points.
      {97, 45, 100},    // One more than a chunk; three panels, so the last has no pair.
      {211, 512, 128},  // Tiles of every size; the benchmark's centroids.
      {60, 100, 256},   // The largest dim.
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(testing::Message()
                 << row.points << " points, " << row.centroids << " centroids, dim " << row.dim);
    Scene scene(random, row.points, row.centroids, row.dim);
    scene.Assign(kernels_);
    for (uint32_t p = 0; p < row.points; ++p) {
      const std::vector<double> exact = scene.Exact(p);
      const double best = *std::max_element(exact.begin(), exact.end());
      ASSERT_LT(scene.slots[p], row.centroids);
      EXPECT_NEAR(scene.dots[p], best, scene.Tolerance());
      EXPECT_GE(exact[scene.slots[p]], best - 2 * scene.Tolerance());
    }
  }
}

TEST_P(AssignTest, LooksOnlyAtTheListedPanels) {
  auto random = NewRandom(41);
  Scene scene(random, 50, 200, 64);
  for (const std::vector<uint16_t>& list :
       {std::vector<uint16_t>{3}, {0, 12}, {1, 4, 5}, {2, 3, 7, 12}}) {
    scene.panel_list = list;
    scene.Assign(kernels_);
    for (uint32_t p = 0; p < scene.point_count(); ++p) {
      const std::vector<double> exact = scene.Exact(p);
      double best = -1e9;
      for (const uint16_t panel : list) {
        const size_t end = std::min<size_t>(200, (panel + 1) * kPanelCentroids);
        for (size_t s = panel * kPanelCentroids; s < end; ++s) best = std::max(best, exact[s]);
      }
      EXPECT_THAT(list, testing::Contains(scene.slots[p] / kPanelCentroids));
      EXPECT_NEAR(scene.dots[p], best, scene.Tolerance());
      EXPECT_NEAR(exact[scene.slots[p]], best, 2 * scene.Tolerance());
    }
  }
}

TEST_P(AssignTest, PrefersTheLowestSlotAmongEquals) {
  auto random = NewRandom(42);
  Scene scene(random, 50, 77, 48);
  for (size_t c = 1; c < 77; ++c) {
    std::copy_n(scene.centroids.begin(), 48, scene.centroids.begin() + c * 48);
  }
  scene.Pack();
  scene.Assign(kernels_);
  EXPECT_THAT(scene.slots, testing::Each(0));
  scene.panel_list = {2, 4};
  scene.Assign(kernels_);
  EXPECT_THAT(scene.slots, testing::Each(2 * kPanelCentroids));
}

TEST_P(AssignTest, DoesNotDependOnHowPointsAreCutIntoCalls) {
  auto random = NewRandom(43);
  Scene scene(random, 150, 90, 70);
  scene.Assign(kernels_);
  for (uint32_t first = 0, count = 1; first < 150; first += count, count += 3) {
    count = std::min(count, 150 - first);
    std::vector<uint32_t> slots(count);
    std::vector<float> dots(count);
    kernels_.nearest_in_panels(&scene.points[first * 70], count, 70, scene.panels.data(),
                               scene.panel_list.data(), scene.panel_list.size(), slots.data(),
                               dots.data());
    for (uint32_t i = 0; i < count; ++i) {
      ASSERT_EQ(slots[i], scene.slots[first + i]);
      ASSERT_EQ(dots[i], scene.dots[first + i]);
    }
  }
}

TEST_P(AssignTest, PanelMaximaMatchDouble) {
  auto random = NewRandom(44);
  for (const uint32_t dim : {33u, 128u}) {
    const Scene scene(random, 40, 75, dim);
    const auto panel_count = static_cast<uint32_t>(PanelCount(75));
    std::vector<float> maxima(40 * panel_count);
    kernels_.panel_maxima(scene.points.data(), 40, dim, scene.panels.data(), panel_count,
                          maxima.data());
    for (uint32_t p = 0; p < 40; ++p) {
      const std::vector<double> exact = scene.Exact(p);
      for (uint32_t q = 0; q < panel_count; ++q) {
        const auto first = exact.begin() + q * kPanelCentroids;
        const auto last = exact.begin() + std::min<size_t>(75, (q + 1) * kPanelCentroids);
        EXPECT_NEAR(maxima[p * panel_count + q], *std::max_element(first, last), scene.Tolerance());
      }
    }
  }
}

TEST_P(AssignTest, LikenessKeepsGroupsTogether) {
  // 8 groups of 16 centroids, apart by 8, 4 and 2 along three axes: a panel each, whatever order
  // they come in.
  auto random = NewRandom(45);
  constexpr uint32_t kDim = 64, kGroups = 8, kCount = kGroups * kPanelCentroids;
  constexpr uint32_t kAxes[] = {40, 3, 17};
  std::vector<float> centroids = Gaussian(random, kCount * kDim, 0.1);
  for (uint32_t c = 0; c < kCount; ++c) {
    for (uint32_t bit = 0; bit < 3; ++bit) {
      const float distance = 1 << bit;
      centroids[c * kDim + kAxes[bit]] += (c >> bit & 1) != 0 ? distance : -distance;
    }
  }
  const std::vector<uint16_t> order = OrderByLikeness(kernels_, centroids, kCount, kDim);
  EXPECT_EQ(std::set<uint16_t>(order.begin(), order.end()).size(), kCount);
  std::vector<float> panels(kCount * kDim);
  PackPanels(centroids.data(), order, kDim, panels.data());
  const std::vector<uint16_t> nearest =
      NearestPanels(kernels_, centroids, kCount, kDim, panels, kGroups, 1);
  for (uint32_t s = 0; s < kCount; ++s) {
    EXPECT_EQ(order[s] % kGroups, order[s / kPanelCentroids * kPanelCentroids] % kGroups);
    EXPECT_EQ(nearest[order[s]], s / kPanelCentroids);
  }
}

TEST_P(AssignTest, LikenessOrdersWhatDoesNotFillPanelsOrDiffer) {
  auto random = NewRandom(46);
  for (const uint32_t count : {1u, 15u, 17u, 33u, 100u, 413u}) {
    for (const bool equal : {false, true}) {
      std::vector<float> centroids = Gaussian(random, size_t{count} * 40);
      if (equal) std::fill(centroids.begin(), centroids.end(), 0.7f);
      const std::vector<uint16_t> order = OrderByLikeness(kernels_, centroids, count, 40);
      EXPECT_EQ(std::set<uint16_t>(order.begin(), order.end()).size(), count);
      EXPECT_EQ(*std::max_element(order.begin(), order.end()), count - 1);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryLevel, AssignTest, testing::ValuesIn(AvailableKernels()),
                         [](const auto& info) {
                           std::string name = info.param->isa;
                           std::erase(name, '-');
                           return name;
                         });

TEST(AssignLevels, LevelsWithFusedMultiplyAddAgreeBitForBit) {
  const auto avx2 = FindKernels("avx2"), avx512 = FindKernels("avx512");
  if (!avx2.ok() || !avx512.ok()) GTEST_SKIP() << "this processor has not both levels";
  auto random = NewRandom(47);
  Scene a(random, 333, 145, 100);
  Scene b = a;
  a.Assign(**avx2);
  b.Assign(**avx512);
  EXPECT_EQ(a.slots, b.slots);
  EXPECT_EQ(a.dots, b.dots);
}

}  // namespace
}  // namespace wavekv::simd
