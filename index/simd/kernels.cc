// Compiled once for each target by Highway's foreach_target; see kernels.h for what each loop does.
#include "index/simd/kernels.h"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "storage/base/check.h"

// The plain level is HWY_SCALAR whatever the compiler, and processors between it and AVX2 are not
// worth their compile time; nor are levels that differ from AVX-512 in instructions not used here.
#define HWY_BROKEN_EMU128 1
#if WAVEKV_HWY_VERSION >= 10005
#define HWY_DISABLED_TARGETS \
  (HWY_SSE2 | HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_AVX3_ZEN4 | HWY_AVX3_SPR)
#else
#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)
#endif
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index/simd/kernels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// Highway's per-target headers come after it.
#include "hwy/contrib/math/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr D kD;
constexpr size_t kLanes = HWY_LANES(float);
// Enough registers for 16 accumulators and their operands?
constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3;
constexpr size_t kHeadsPerPass = 4;
constexpr size_t kRowsPerPass = 4;

// kLanes elements as floats, exactly.
template <DType kType>
HWY_INLINE V LoadFloats(const uint8_t* HWY_RESTRICT source) {
  if constexpr (kType == DType::kF32) {
    return hn::LoadU(kD, reinterpret_cast<const float*>(source));
  } else if constexpr (kType == DType::kBF16) {
    const hn::Rebind<uint16_t, D> d16;
    const hn::Rebind<uint32_t, D> d32;
    const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(source));
    return hn::BitCast(kD, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
  } else {
    const hn::Rebind<hwy::float16_t, D> d16;
    return hn::PromoteTo(kD, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(source)));
  }
}

// The first `count` < kLanes elements, then zeros; reads nothing beyond them.
template <DType kType>
HWY_INLINE V LoadFewFloats(const uint8_t* HWY_RESTRICT source, size_t count) {
  alignas(64) uint8_t padded[kLanes * sizeof(float)] = {};
  std::memcpy(padded, source, count * DTypeBytes(kType));
  return LoadFloats<kType>(padded);
}

HWY_INLINE V LoadFew(const float* source, size_t count) {
  return LoadFewFloats<DType::kF32>(reinterpret_cast<const uint8_t*>(source), count);
}

HWY_INLINE void StoreFew(V v, float* target, size_t count) {
  alignas(64) float all[kLanes];
  hn::Store(v, kD, all);
  std::memcpy(target, all, count * sizeof(float));
}

HWY_INLINE V ClampScore(V score) {
  // Max comes first: on x86 it turns the NaN of an overflowed (inf - inf) sum into -kScoreMax.
  return hn::Min(hn::Max(score, hn::Set(kD, -kScoreMax)), hn::Set(kD, kScoreMax));
}

HWY_INLINE float HorizontalSum(V v) { return hn::GetLane(hn::SumOfLanes(kD, v)); }

template <DType kType, size_t kHeads, size_t kRows>
HWY_INLINE void DotTile(const float* HWY_RESTRICT queries, size_t dim,
                        const uint8_t* HWY_RESTRICT rows, float scale, float* HWY_RESTRICT scores,
                        size_t score_stride) {
  const size_t row_bytes = dim * DTypeBytes(kType);
  V sums[kHeads][kRows];
  for (auto& head : sums) {
    for (auto& sum : head) sum = hn::Zero(kD);
  }
  size_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    V keys[kRows];
    for (size_t r = 0; r < kRows; ++r) {
      keys[r] = LoadFloats<kType>(rows + r * row_bytes + j * DTypeBytes(kType));
    }
    for (size_t g = 0; g < kHeads; ++g) {
      const V query = hn::LoadU(kD, queries + g * dim + j);
      for (size_t r = 0; r < kRows; ++r) sums[g][r] = hn::MulAdd(query, keys[r], sums[g][r]);
    }
  }
  if (j < dim) {
    for (size_t r = 0; r < kRows; ++r) {
      const V key = LoadFewFloats<kType>(rows + r * row_bytes + j * DTypeBytes(kType), dim - j);
      for (size_t g = 0; g < kHeads; ++g) {
        sums[g][r] = hn::MulAdd(LoadFew(queries + g * dim + j, dim - j), key, sums[g][r]);
      }
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t r = 0; r < kRows; ++r) {
      const V total = hn::Set(kD, HorizontalSum(sums[g][r]) * scale);
      scores[g * score_stride + r] = hn::GetLane(ClampScore(total));
    }
  }
}

template <DType kType, size_t kHeads>
void DotHeads(const float* queries, size_t dim, const uint8_t* rows, size_t row_count, float scale,
              float* scores, size_t score_stride) {
  const size_t row_bytes = dim * DTypeBytes(kType);
  size_t r = 0;
  for (; r + kRowsPerPass <= row_count; r += kRowsPerPass) {
    DotTile<kType, kHeads, kRowsPerPass>(queries, dim, rows + r * row_bytes, scale, scores + r,
                                         score_stride);
  }
  for (; r < row_count; ++r) {
    DotTile<kType, kHeads, 1>(queries, dim, rows + r * row_bytes, scale, scores + r, score_stride);
  }
}

template <DType kType>
void DotRowsOf(const float* queries, size_t group_size, size_t dim, const uint8_t* rows,
               size_t row_count, float scale, float* scores, size_t score_stride) {
  for (size_t g = 0; g < group_size; g += kHeadsPerPass) {
    const float* q = queries + g * dim;
    float* out = scores + g * score_stride;
    switch (group_size - g) {
      case 1:
        DotHeads<kType, 1>(q, dim, rows, row_count, scale, out, score_stride);
        break;
      case 2:
        DotHeads<kType, 2>(q, dim, rows, row_count, scale, out, score_stride);
        break;
      case 3:
        DotHeads<kType, 3>(q, dim, rows, row_count, scale, out, score_stride);
        break;
      default:
        DotHeads<kType, kHeadsPerPass>(q, dim, rows, row_count, scale, out, score_stride);
    }
  }
}

void DotRows(DType dtype, const float* queries, size_t group_size, size_t dim, const void* rows,
             size_t row_count, float scale, float* scores, size_t score_stride) {
  const auto* bytes = static_cast<const uint8_t*>(rows);
  switch (dtype) {
    case DType::kF32:
      return DotRowsOf<DType::kF32>(queries, group_size, dim, bytes, row_count, scale, scores,
                                    score_stride);
    case DType::kF16:
      return DotRowsOf<DType::kF16>(queries, group_size, dim, bytes, row_count, scale, scores,
                                    score_stride);
    case DType::kBF16:
      return DotRowsOf<DType::kBF16>(queries, group_size, dim, bytes, row_count, scale, scores,
                                     score_stride);
  }
}

// Columns [0, kVectors * kLanes) of the rows, or the first `few` < kLanes of them when few != 0.
template <DType kType, size_t kHeads, size_t kVectors>
HWY_INLINE void AccumulateColumns(const uint8_t* HWY_RESTRICT rows, size_t row_count,
                                  size_t row_bytes, size_t few, const float* HWY_RESTRICT weights,
                                  size_t weight_stride, float* HWY_RESTRICT sums,
                                  size_t sum_stride) {
  V totals[kHeads][kVectors];
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t v = 0; v < kVectors; ++v) {
      const float* sum = sums + g * sum_stride + v * kLanes;
      totals[g][v] = few == 0 ? hn::LoadU(kD, sum) : LoadFew(sum, few);
    }
  }
  for (size_t r = 0; r < row_count; ++r) {
    V values[kVectors];
    for (size_t v = 0; v < kVectors; ++v) {
      const uint8_t* source = rows + r * row_bytes + v * kLanes * DTypeBytes(kType);
      values[v] = few == 0 ? LoadFloats<kType>(source) : LoadFewFloats<kType>(source, few);
    }
    for (size_t g = 0; g < kHeads; ++g) {
      const V weight = hn::Set(kD, weights[g * weight_stride + r]);
      for (size_t v = 0; v < kVectors; ++v) {
        totals[g][v] = hn::MulAdd(weight, values[v], totals[g][v]);
      }
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t v = 0; v < kVectors; ++v) {
      float* sum = sums + g * sum_stride + v * kLanes;
      if (few == 0) {
        hn::StoreU(totals[g][v], kD, sum);
      } else {
        StoreFew(totals[g][v], sum, few);
      }
    }
  }
}

template <DType kType, size_t kHeads>
void AccumulateHeads(const uint8_t* rows, size_t row_count, size_t dim, const float* weights,
                     size_t weight_stride, float* sums, size_t sum_stride) {
  constexpr size_t kVectors = kManyRegisters ? 4 : 2;
  const size_t row_bytes = dim * DTypeBytes(kType);
  size_t j = 0;
  for (; j + kVectors * kLanes <= dim; j += kVectors * kLanes) {
    AccumulateColumns<kType, kHeads, kVectors>(rows + j * DTypeBytes(kType), row_count, row_bytes,
                                               0, weights, weight_stride, sums + j, sum_stride);
  }
  for (; j < dim; j += kLanes) {
    const size_t few = dim - j < kLanes ? dim - j : 0;
    AccumulateColumns<kType, kHeads, 1>(rows + j * DTypeBytes(kType), row_count, row_bytes, few,
                                        weights, weight_stride, sums + j, sum_stride);
  }
}

template <DType kType>
void AccumulateRowsOf(const uint8_t* rows, size_t row_count, size_t dim, const float* weights,
                      size_t weight_stride, size_t group_size, float* sums, size_t sum_stride) {
  for (size_t g = 0; g < group_size; g += kHeadsPerPass) {
    const float* w = weights + g * weight_stride;
    float* out = sums + g * sum_stride;
    switch (group_size - g) {
      case 1:
        AccumulateHeads<kType, 1>(rows, row_count, dim, w, weight_stride, out, sum_stride);
        break;
      case 2:
        AccumulateHeads<kType, 2>(rows, row_count, dim, w, weight_stride, out, sum_stride);
        break;
      case 3:
        AccumulateHeads<kType, 3>(rows, row_count, dim, w, weight_stride, out, sum_stride);
        break;
      default:
        AccumulateHeads<kType, kHeadsPerPass>(rows, row_count, dim, w, weight_stride, out,
                                              sum_stride);
    }
  }
}

void AccumulateRows(DType dtype, const void* rows, size_t row_count, size_t dim,
                    const float* weights, size_t weight_stride, size_t group_size, float* sums,
                    size_t sum_stride) {
  const auto* bytes = static_cast<const uint8_t*>(rows);
  switch (dtype) {
    case DType::kF32:
      return AccumulateRowsOf<DType::kF32>(bytes, row_count, dim, weights, weight_stride,
                                           group_size, sums, sum_stride);
    case DType::kF16:
      return AccumulateRowsOf<DType::kF16>(bytes, row_count, dim, weights, weight_stride,
                                           group_size, sums, sum_stride);
    case DType::kBF16:
      return AccumulateRowsOf<DType::kBF16>(bytes, row_count, dim, weights, weight_stride,
                                            group_size, sums, sum_stride);
  }
}

float Max(const float* x, size_t n) {
  V largest = hn::Set(kD, -std::numeric_limits<float>::infinity());
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) largest = hn::Max(largest, hn::LoadU(kD, x + i));
  float result = hn::GetLane(hn::MaxOfLanes(kD, largest));
  for (; i < n; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

float ExpSum(float* x, size_t n, float shift) {
  const V shift_v = hn::Set(kD, shift);
  V sum = hn::Zero(kD);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const V e = hn::Exp(kD, hn::Sub(hn::LoadU(kD, x + i), shift_v));
    hn::StoreU(e, kD, x + i);
    sum = hn::Add(sum, e);
  }
  float result = HorizontalSum(sum);
  if (i < n) {
    alignas(64) float rest[kLanes] = {};
    std::memcpy(rest, x + i, (n - i) * sizeof(float));
    hn::Store(hn::Exp(kD, hn::Sub(hn::Load(kD, rest), shift_v)), kD, rest);
    std::memcpy(x + i, rest, (n - i) * sizeof(float));
    for (size_t k = 0; k < n - i; ++k) result += rest[k];
  }
  return result;
}

void AddArrays(const float* a, const float* b, size_t n, float* out) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::Add(hn::LoadU(kD, a + i), hn::LoadU(kD, b + i)), kD, out + i);
  }
  for (; i < n; ++i) out[i] = a[i] + b[i];
}

void Scale(float* x, size_t n, float factor) {
  const V factor_v = hn::Set(kD, factor);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(kD, x + i), factor_v), kD, x + i);
  }
  for (; i < n; ++i) x[i] *= factor;
}

void MultiplyAdd(float factor, const float* x, size_t n, float* y) {
  const V factor_v = hn::Set(kD, factor);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::MulAdd(factor_v, hn::LoadU(kD, x + i), hn::LoadU(kD, y + i)), kD, y + i);
  }
  for (; i < n; ++i) y[i] += factor * x[i];
}

void AddMisjudged(float weight, float reach_squared, const float* share, const float* key_spreads,
                  const float* value_spreads, size_t n, float* rank) {
  constexpr float kVarianceMax = 4.0f, kSixth = 1.0f / 6;
  const V reach_v = hn::Set(kD, reach_squared), weight_v = hn::Set(kD, weight);
  const auto term = [&](V shares, V keys, V values) HWY_ATTR {
    const V v = hn::Min(hn::Mul(reach_v, keys), hn::Set(kD, kVarianceMax));
    const V series =
        hn::MulAdd(v, hn::MulAdd(v, hn::Set(kD, kSixth), hn::Set(kD, 0.5f)), hn::Set(kD, 1.0f));
    return hn::Mul(hn::Mul(weight_v, shares), hn::Mul(values, hn::Sqrt(hn::Mul(v, series))));
  };
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const V added = term(hn::LoadU(kD, share + i), hn::LoadU(kD, key_spreads + i),
                         hn::LoadU(kD, value_spreads + i));
    hn::StoreU(hn::Add(hn::LoadU(kD, rank + i), added), kD, rank + i);
  }
  for (; i < n; ++i) {
    const V added =
        term(hn::Set(kD, share[i]), hn::Set(kD, key_spreads[i]), hn::Set(kD, value_spreads[i]));
    rank[i] += hn::GetLane(added);
  }
}

template <DType kType>
void ToFloatOf(const uint8_t* source, size_t n, float* target) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(LoadFloats<kType>(source + i * DTypeBytes(kType)), kD, target + i);
  }
  if (i < n) {
    StoreFew(LoadFewFloats<kType>(source + i * DTypeBytes(kType), n - i), target + i, n - i);
  }
}

void ToFloat(DType dtype, const void* source, size_t n, float* target) {
  const auto* bytes = static_cast<const uint8_t*>(source);
  switch (dtype) {
    case DType::kF32:
      return ToFloatOf<DType::kF32>(bytes, n, target);
    case DType::kF16:
      return ToFloatOf<DType::kF16>(bytes, n, target);
    case DType::kBF16:
      return ToFloatOf<DType::kBF16>(bytes, n, target);
  }
}

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

const char* IsaName() {
  switch (HWY_TARGET) {
    case HWY_SCALAR:
      return "scalar";
    case HWY_AVX2:
      return "avx2";
    case HWY_AVX3:
      return "avx512";
    case HWY_NEON:
      return "neon";
    default:
      return hwy::TargetName(HWY_TARGET);
  }
}

const Kernels* GetKernels() {
  static const Kernels kernels = {IsaName(),    kLanes,        &DotRows,   &AccumulateRows,
                                  &Max,         &ExpSum,       &AddArrays, &Scale,
                                  &MultiplyAdd, &AddMisjudged, &ToFloat,   &SquaredDistances,
                                  &NearestByDot};
  return &kernels;
}

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {
namespace {

HWY_EXPORT(GetKernels);

// Best first: a lower bit is a better target.
std::vector<const Kernels*> ListKernels() {
  std::vector<const Kernels*> levels;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    levels.push_back(HWY_DYNAMIC_DISPATCH(GetKernels)());
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return levels;
}

}  // namespace

std::span<const Kernels* const> AvailableKernels() {
  static const std::vector<const Kernels*> levels = ListKernels();
  return levels;
}

absl::StatusOr<const Kernels*> FindKernels(std::string_view isa) {
  std::string available;
  for (const Kernels* kernels : AvailableKernels()) {
    if (isa.empty() || isa == kernels->isa) return kernels;
    absl::StrAppend(&available, available.empty() ? "" : ", ", kernels->isa);
  }
  return absl::InvalidArgumentError(absl::StrCat("WAVEKV_ISA is '",
                                                 absl::string_view(isa.data(), isa.size()),
                                                 "', expected one of: ", available));
}

const Kernels& ActiveKernels() {
  static const Kernels* const active = [] {
    const char* isa = std::getenv("WAVEKV_ISA");
    absl::StatusOr<const Kernels*> found = FindKernels(isa == nullptr ? "" : isa);
    WAVEKV_CHECK(found.ok(), std::string(found.status().message()).c_str());
    return *found;
  }();
  return *active;
}

}  // namespace wavekv::simd
#endif  // HWY_ONCE
