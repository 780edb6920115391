// Distances to centroids, for clustering.
// Compiled once for each target by Highway's foreach_target; see kernels.h for what each loop does.
#include <limits>

#include "index/simd/kernel_parts.h"
#include "index/simd/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index/simd/assign.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// Per-target headers come after it.
#include "index/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {

void SquaredDistances(const float* rows, size_t row_count, size_t dim, const float* center,
                      float* out) {
  for (size_t r = 0; r < row_count; ++r) {
    const float* row = rows + r * dim;
    V sum = hn::Zero(kD);
    size_t j = 0;
    for (; j + kLanes <= dim; j += kLanes) {
      const V difference = hn::Sub(hn::LoadU(kD, row + j), hn::LoadU(kD, center + j));
      sum = hn::MulAdd(difference, difference, sum);
    }
    if (j < dim) {
      const V difference = hn::Sub(LoadFew(row + j, dim - j), LoadFew(center + j, dim - j));
      sum = hn::MulAdd(difference, difference, sum);
    }
    out[r] = HorizontalSum(sum);
  }
}

// A panel is two vectors of centroids, transposed: [dim][2 * kLanes].
constexpr size_t kPanelWidth = 2 * kLanes;
constexpr size_t kPointsPerPass = kManyRegisters ? 12 : 6;
// Points whose running best stays in the first-level cache while all panels pass by.
constexpr size_t kPointsPerChunk = 8 * kPointsPerPass;

struct Best {
  alignas(64) float dot[kPointsPerChunk][kLanes];
  alignas(64) int32_t label[kPointsPerChunk][kLanes];
};

template <size_t kPoints>
HWY_INLINE void ComparePanel(const float* HWY_RESTRICT points, size_t dim,
                             const float* HWY_RESTRICT panel, int32_t first_label,
                             float (*HWY_RESTRICT best_dot)[kLanes],
                             int32_t (*HWY_RESTRICT best_label)[kLanes]) {
  V low[kPoints], high[kPoints];
  for (size_t p = 0; p < kPoints; ++p) low[p] = high[p] = hn::Zero(kD);
  for (size_t j = 0; j < dim; ++j) {
    const V panel_low = hn::LoadU(kD, panel + j * kPanelWidth);
    const V panel_high = hn::LoadU(kD, panel + j * kPanelWidth + kLanes);
    for (size_t p = 0; p < kPoints; ++p) {
      const V x = hn::Set(kD, points[p * dim + j]);
      low[p] = hn::MulAdd(x, panel_low, low[p]);
      high[p] = hn::MulAdd(x, panel_high, high[p]);
    }
  }
  const hn::RebindToSigned<D> di;
  const auto low_label = hn::Iota(di, first_label);
  const auto high_label = hn::Iota(di, first_label + static_cast<int32_t>(kLanes));
  for (size_t p = 0; p < kPoints; ++p) {
    V dot = hn::Load(kD, best_dot[p]);
    auto label = hn::Load(di, best_label[p]);
    const auto low_wins = hn::Gt(low[p], dot);
    dot = hn::IfThenElse(low_wins, low[p], dot);
    label = hn::IfThenElse(hn::RebindMask(di, low_wins), low_label, label);
    const auto high_wins = hn::Gt(high[p], dot);
    dot = hn::IfThenElse(high_wins, high[p], dot);
    label = hn::IfThenElse(hn::RebindMask(di, high_wins), high_label, label);
    hn::Store(dot, kD, best_dot[p]);
    hn::Store(label, di, best_label[p]);
  }
}

// Fills up the last panel with copies of the last centroid, which never win against it.
void PackPanels(const float* centroids, size_t centroid_count, size_t dim, float* packed) {
  for (size_t first = 0; first < centroid_count; first += kPanelWidth) {
    float* panel = packed + first * dim;
    for (size_t c = 0; c < kPanelWidth; ++c) {
      const size_t source = first + c < centroid_count ? first + c : centroid_count - 1;
      for (size_t j = 0; j < dim; ++j) panel[j * kPanelWidth + c] = centroids[source * dim + j];
    }
  }
}

void NearestByDot(const float* points, size_t point_count, const float* centroids,
                  size_t centroid_count, size_t dim, float* scratch, int64_t* labels, float* dots) {
  static_assert(kPanelWidth <= 128, "NearestScratchFloats pads by 128 centroids");
  PackPanels(centroids, centroid_count, dim, scratch);
  Best best;
  for (size_t start = 0; start < point_count; start += kPointsPerChunk) {
    const size_t count =
        point_count - start < kPointsPerChunk ? point_count - start : kPointsPerChunk;
    for (size_t p = 0; p < count; ++p) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        best.dot[p][lane] = -std::numeric_limits<float>::infinity();
        best.label[p][lane] = 0;
      }
    }
    const float* chunk = points + start * dim;
    for (size_t first = 0; first < centroid_count; first += kPanelWidth) {
      const float* panel = scratch + first * dim;
      const auto label = static_cast<int32_t>(first);
      size_t p = 0;
      for (; p + kPointsPerPass <= count; p += kPointsPerPass) {
        ComparePanel<kPointsPerPass>(chunk + p * dim, dim, panel, label, best.dot + p,
                                     best.label + p);
      }
      for (; p < count; ++p) {
        ComparePanel<1>(chunk + p * dim, dim, panel, label, best.dot + p, best.label + p);
      }
    }
    for (size_t p = 0; p < count; ++p) {
      size_t winner = 0;
      for (size_t lane = 1; lane < kLanes; ++lane) {
        const bool larger = best.dot[p][lane] > best.dot[p][winner];
        const bool equal = best.dot[p][lane] == best.dot[p][winner];
        if (larger || (equal && best.label[p][lane] < best.label[p][winner])) winner = lane;
      }
      labels[start + p] = best.label[p][winner];
      dots[start + p] = best.dot[p][winner];
    }
  }
}

void FillAssign(Kernels* kernels) {
  kernels->squared_distances = &SquaredDistances;
  kernels->nearest_by_dot = &NearestByDot;
}

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {

HWY_EXPORT(FillAssign);

void SetAssignKernels(Kernels* kernels) { HWY_DYNAMIC_DISPATCH(FillAssign)(kernels); }

}  // namespace wavekv::simd
#endif  // HWY_ONCE
