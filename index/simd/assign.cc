// The nearest of many centroids, for clustering.
// Compiled once for each target by Highway's foreach_target; see kernels.h for what each loop does.
#include "index/simd/assign.h"

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

using DI = hn::RebindToSigned<D>;
constexpr DI kDI;
// Accumulators are two vectors for each point of a tile: 24 of 32 registers, or 12 of 16.
constexpr size_t kTilePoints = kManyRegisters ? 12 : 6;
// Points whose running best stays in the first-level cache while all panels pass by.
constexpr size_t kChunkPoints = 96;
static_assert(kPanelCentroids % kLanes == 0, "a vector does not straddle panels");

// Two vectors of centroids: both halves of a panel, or a panel each where one vector holds it.
struct Columns {
  const float* low;
  const float* high;
  int32_t low_slot;
  int32_t high_slot;
};

// The dot products of kPoints points with two vectors of centroids.
template <size_t kPoints>
HWY_INLINE void DotColumns(const float* HWY_RESTRICT points, size_t dim, const Columns& columns,
                           V (&low)[kPoints], V (&high)[kPoints]) {
  for (size_t p = 0; p < kPoints; ++p) low[p] = high[p] = hn::Zero(kD);
  const float* HWY_RESTRICT low_column = columns.low;
  const float* HWY_RESTRICT high_column = columns.high;
  for (size_t j = 0; j < dim; ++j) {
    const V centroids_low = hn::LoadU(kD, low_column + j * kPanelCentroids);
    const V centroids_high = hn::LoadU(kD, high_column + j * kPanelCentroids);
    for (size_t p = 0; p < kPoints; ++p) {
      const V x = hn::Set(kD, points[p * dim + j]);
      low[p] = hn::MulAdd(x, centroids_low, low[p]);
      high[p] = hn::MulAdd(x, centroids_high, high[p]);
    }
  }
}

// The best of each lane so far, for the points of a chunk.
struct Best {
  alignas(64) float dot[kChunkPoints][kLanes];
  alignas(64) int32_t slot[kChunkPoints][kLanes];
};

template <size_t kPoints>
HWY_INLINE void CompareTile(const float* points, size_t dim, const Columns& columns, size_t first,
                            Best* HWY_RESTRICT best) {
  V low[kPoints], high[kPoints];
  DotColumns<kPoints>(points + first * dim, dim, columns, low, high);
  const auto low_slots = hn::Iota(kDI, columns.low_slot);
  const auto high_slots = hn::Iota(kDI, columns.high_slot);
  for (size_t p = 0; p < kPoints; ++p) {
    V dot = hn::Load(kD, best->dot[first + p]);
    auto slot = hn::Load(kDI, best->slot[first + p]);
    const auto low_wins = hn::Gt(low[p], dot);
    dot = hn::IfThenElse(low_wins, low[p], dot);
    slot = hn::IfThenElse(hn::RebindMask(kDI, low_wins), low_slots, slot);
    const auto high_wins = hn::Gt(high[p], dot);
    dot = hn::IfThenElse(high_wins, high[p], dot);
    slot = hn::IfThenElse(hn::RebindMask(kDI, high_wins), high_slots, slot);
    hn::Store(dot, kD, best->dot[first + p]);
    hn::Store(slot, kDI, best->slot[first + p]);
  }
}

// Points [first, count): tiles of kPoints, then smaller ones.
template <size_t kPoints>
HWY_INLINE void CompareTiles(const float* points, size_t count, size_t dim, const Columns& columns,
                             size_t first, Best* best) {
  for (; first + kPoints <= count; first += kPoints) {
    CompareTile<kPoints>(points, dim, columns, first, best);
  }
  if constexpr (kPoints > 1) CompareTiles<kPoints / 2>(points, count, dim, columns, first, best);
}

HWY_INLINE Columns ColumnsAt(const float* panels, size_t panel_floats, size_t panel, size_t pair,
                             size_t column) {
  return {panels + panel * panel_floats + column, panels + pair * panel_floats,
          static_cast<int32_t>(panel * kPanelCentroids + column),
          static_cast<int32_t>(pair * kPanelCentroids)};
}

// Calls fn with the columns of every listed panel, in ascending order of slots.
template <typename Fn>
HWY_INLINE void ForEachColumns(const float* panels, size_t dim, const uint16_t* list, size_t count,
                               const Fn& fn) {
  const size_t panel_floats = dim * kPanelCentroids;
  if constexpr (kLanes == kPanelCentroids) {
    for (size_t i = 0; i < count; i += 2) {
      // An odd one is compared with itself, and a slot never wins against itself.
      const size_t pair = i + 1 < count ? list[i + 1] : list[i];
      fn(ColumnsAt(panels, panel_floats, list[i], pair, 0));
    }
  } else {
    for (size_t i = 0; i < count; ++i) {
      for (size_t c = 0; c < kPanelCentroids; c += 2 * kLanes) {
        Columns columns = ColumnsAt(panels, panel_floats, list[i], list[i], c);
        columns.high += c + kLanes;
        columns.high_slot += static_cast<int32_t>(c + kLanes);
        fn(columns);
      }
    }
  }
}

void NearestInPanels(const float* points, size_t point_count, size_t dim, const float* panels,
                     const uint16_t* panel_list, size_t list_count, uint32_t* slots, float* dots) {
  Best best;
  for (size_t start = 0; start < point_count; start += kChunkPoints) {
    const size_t count = point_count - start < kChunkPoints ? point_count - start : kChunkPoints;
    for (size_t p = 0; p < count; ++p) {
      hn::Store(hn::Set(kD, -std::numeric_limits<float>::infinity()), kD, best.dot[p]);
      hn::Store(hn::Zero(kDI), kDI, best.slot[p]);
    }
    const float* chunk = points + start * dim;
    ForEachColumns(panels, dim, panel_list, list_count, [&](const Columns& columns) HWY_ATTR {
      CompareTiles<kTilePoints>(chunk, count, dim, columns, 0, &best);
    });
    for (size_t p = 0; p < count; ++p) {
      const V dot = hn::Load(kD, best.dot[p]);
      const V largest = hn::MaxOfLanes(kD, dot);
      const auto none = hn::Set(kDI, std::numeric_limits<int32_t>::max());
      const auto ties = hn::IfThenElse(hn::RebindMask(kDI, hn::Eq(dot, largest)),
                                       hn::Load(kDI, best.slot[p]), none);
      slots[start + p] = static_cast<uint32_t>(hn::GetLane(hn::MinOfLanes(kDI, ties)));
      dots[start + p] = hn::GetLane(largest);
    }
  }
}

template <size_t kPoints>
HWY_INLINE void MaximaTile(const float* points, size_t dim, const float* panel,
                           float* HWY_RESTRICT maxima, size_t stride) {
  V largest[kPoints];
  for (auto& v : largest) v = hn::Set(kD, -std::numeric_limits<float>::infinity());
  for (size_t c = 0; c < kPanelCentroids; c += 2 * kLanes) {
    V low[kPoints], high[kPoints];
    // One vector may hold the whole panel; it is then its own pair.
    const size_t high_column = c + kLanes < kPanelCentroids ? c + kLanes : c;
    DotColumns<kPoints>(points, dim, {panel + c, panel + high_column, 0, 0}, low, high);
    for (size_t p = 0; p < kPoints; ++p) {
      largest[p] = hn::Max(largest[p], hn::Max(low[p], high[p]));
    }
  }
  for (size_t p = 0; p < kPoints; ++p) {
    maxima[p * stride] = hn::GetLane(hn::MaxOfLanes(kD, largest[p]));
  }
}

void PanelMaxima(const float* points, size_t point_count, size_t dim, const float* panels,
                 size_t panel_count, float* maxima) {
  for (size_t q = 0; q < panel_count; ++q) {
    const float* panel = panels + q * dim * kPanelCentroids;
    size_t p = 0;
    for (; p + kTilePoints <= point_count; p += kTilePoints) {
      MaximaTile<kTilePoints>(points + p * dim, dim, panel, maxima + p * panel_count + q,
                              panel_count);
    }
    for (; p < point_count; ++p) {
      MaximaTile<1>(points + p * dim, dim, panel, maxima + p * panel_count + q, panel_count);
    }
  }
}

void FillAssign(Kernels* kernels) {
  kernels->nearest_in_panels = &NearestInPanels;
  kernels->panel_maxima = &PanelMaxima;
}

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {

HWY_EXPORT(FillAssign);

void SetAssignKernels(Kernels* kernels) { HWY_DYNAMIC_DISPATCH(FillAssign)(kernels); }

void PackPanels(const float* centroids, std::span<const uint16_t> order, size_t dim,
                float* panels) {
  for (size_t slot = 0; slot < PanelCount(order.size()) * kPanelCentroids; ++slot) {
    const float* centroid = centroids + order[slot < order.size() ? slot : order.size() - 1] * dim;
    float* column =
        panels + slot / kPanelCentroids * kPanelCentroids * dim + slot % kPanelCentroids;
    for (size_t j = 0; j < dim; ++j) column[j * kPanelCentroids] = centroid[j];
  }
}

}  // namespace wavekv::simd
#endif  // HWY_ONCE
