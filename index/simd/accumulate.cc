// Sums of rows by weight, for a few query heads at a time: stored rows, 8-bit means, 4-bit codes.
// Compiled once for each target by Highway's foreach_target; see kernels.h for what each loop does.
#include <cstring>

#include "index/simd/kernel_parts.h"
#include "index/simd/targets.h"
#include "index/token_sketch.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index/simd/accumulate.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// Per-target headers come after it.
#include "index/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {

// What is added up, row by row: Row(i) is the number of the i-th of them, which its weight goes by,
// Load the floats from a column on, LoadFew the first `few` < kLanes of them and then zeros.

// All of dense rows.
template <DType kType>
struct StoredRows {
  const uint8_t* HWY_RESTRICT rows;
  size_t row_bytes;

  HWY_INLINE size_t Row(size_t i) const { return i; }
  HWY_INLINE const uint8_t* At(size_t row, size_t column) const {
    return rows + row * row_bytes + column * DTypeBytes(kType);
  }
  HWY_INLINE V Load(size_t row, size_t column) const { return LoadFloats<kType>(At(row, column)); }
  HWY_INLINE V LoadFew(size_t row, size_t column, size_t few) const {
    return LoadFewFloats<kType>(At(row, column), few);
  }
};

// Some rows of bytes.
struct ListedRows {
  const uint8_t* HWY_RESTRICT rows;
  size_t row_bytes;
  const uint32_t* HWY_RESTRICT list;

  HWY_INLINE size_t Row(size_t i) const { return list[i]; }
  HWY_INLINE const uint8_t* At(size_t row, size_t column) const {
    return rows + row * row_bytes + column;
  }
};

// Signed bytes.
struct ListedMeans : ListedRows {
  HWY_INLINE static V Decode(const uint8_t* HWY_RESTRICT bytes) {
    const hn::Rebind<int8_t, D> d8;
    const hn::Rebind<int32_t, D> d32;
    const auto codes = hn::LoadU(d8, reinterpret_cast<const int8_t*>(bytes));
    return hn::ConvertTo(kD, hn::PromoteTo(d32, codes));
  }
  HWY_INLINE V Load(size_t row, size_t column) const { return Decode(At(row, column)); }
  HWY_INLINE V LoadFew(size_t row, size_t column, size_t few) const {
    alignas(64) uint8_t padded[kLanes] = {};
    std::memcpy(padded, At(row, column), few);
    return Decode(padded);
  }
};

// Codes of 4 bits about their middle, those in the low or in the high halves of the bytes.
template <bool kHigh>
struct ListedCodes : ListedRows {
  HWY_INLINE static V Decode(const uint8_t* HWY_RESTRICT bytes) {
    const hn::Rebind<uint8_t, D> d8;
    const hn::Rebind<uint32_t, D> du32;
    const auto both = hn::PromoteTo(du32, hn::LoadU(d8, bytes));
    const auto code =
        kHigh ? hn::ShiftRight<kSketchBits>(both) : hn::And(both, hn::Set(du32, kSketchCodeMax));
    return hn::Sub(hn::ConvertTo(kD, hn::BitCast(hn::RebindToSigned<D>(), code)),
                   hn::Set(kD, kSketchCodeMiddle));
  }
  HWY_INLINE V Load(size_t row, size_t column) const { return Decode(At(row, column)); }
  // What follows the first `few` is of no meaning.
  HWY_INLINE V LoadFew(size_t row, size_t column, size_t few) const {
    alignas(64) uint8_t padded[kLanes] = {};
    std::memcpy(padded, At(row, column), few);
    return Decode(padded);
  }
};

// Columns [column, column + kVectors * kLanes) of `count` rows, or the first `few` < kLanes of them
// when few != 0.
template <size_t kHeads, size_t kVectors, class Rows>
HWY_INLINE void AccumulateColumns(const Rows& rows, size_t count, size_t column, size_t few,
                                  const float* HWY_RESTRICT weights, size_t weight_stride,
                                  float* HWY_RESTRICT sums, size_t sum_stride) {
  V totals[kHeads][kVectors];
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t v = 0; v < kVectors; ++v) {
      const float* sum = sums + g * sum_stride + column + v * kLanes;
      totals[g][v] = few == 0 ? hn::LoadU(kD, sum) : LoadFew(sum, few);
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const size_t row = rows.Row(i);
    V values[kVectors];
    for (size_t v = 0; v < kVectors; ++v) {
      const size_t j = column + v * kLanes;
      values[v] = few == 0 ? rows.Load(row, j) : rows.LoadFew(row, j, few);
    }
    for (size_t g = 0; g < kHeads; ++g) {
      const V weight = hn::Set(kD, weights[g * weight_stride + row]);
      for (size_t v = 0; v < kVectors; ++v) {
        totals[g][v] = hn::MulAdd(weight, values[v], totals[g][v]);
      }
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t v = 0; v < kVectors; ++v) {
      float* sum = sums + g * sum_stride + column + v * kLanes;
      if (few == 0) {
        hn::StoreU(totals[g][v], kD, sum);
      } else {
        StoreFew(totals[g][v], sum, few);
      }
    }
  }
}

template <size_t kHeads, class Rows>
void AccumulateHeads(const Rows& rows, size_t count, size_t columns, const float* weights,
                     size_t weight_stride, float* sums, size_t sum_stride) {
  constexpr size_t kVectors = kManyRegisters ? 4 : 2;
  size_t j = 0;
  for (; j + kVectors * kLanes <= columns; j += kVectors * kLanes) {
    AccumulateColumns<kHeads, kVectors>(rows, count, j, 0, weights, weight_stride, sums,
                                        sum_stride);
  }
  for (; j < columns; j += kLanes) {
    const size_t few = columns - j < kLanes ? columns - j : 0;
    AccumulateColumns<kHeads, 1>(rows, count, j, few, weights, weight_stride, sums, sum_stride);
  }
}

template <class Rows>
void Accumulate(const Rows& rows, size_t count, size_t columns, const float* weights,
                size_t weight_stride, size_t group_size, float* sums, size_t sum_stride) {
  for (size_t g = 0; g < group_size; g += kHeadsPerPass) {
    const float* w = weights + g * weight_stride;
    float* out = sums + g * sum_stride;
    switch (group_size - g) {
      case 1:
        AccumulateHeads<1>(rows, count, columns, w, weight_stride, out, sum_stride);
        break;
      case 2:
        AccumulateHeads<2>(rows, count, columns, w, weight_stride, out, sum_stride);
        break;
      case 3:
        AccumulateHeads<3>(rows, count, columns, w, weight_stride, out, sum_stride);
        break;
      default:
        AccumulateHeads<kHeadsPerPass>(rows, count, columns, w, weight_stride, out, sum_stride);
    }
  }
}

template <DType kType>
void AccumulateRowsOf(const void* rows, size_t row_count, size_t dim, const float* weights,
                      size_t weight_stride, size_t group_size, float* sums, size_t sum_stride) {
  const StoredRows<kType> stored = {static_cast<const uint8_t*>(rows), dim * DTypeBytes(kType)};
  Accumulate(stored, row_count, dim, weights, weight_stride, group_size, sums, sum_stride);
}

void AccumulateRows(DType dtype, const void* rows, size_t row_count, size_t dim,
                    const float* weights, size_t weight_stride, size_t group_size, float* sums,
                    size_t sum_stride) {
  switch (dtype) {
    case DType::kF32:
      return AccumulateRowsOf<DType::kF32>(rows, row_count, dim, weights, weight_stride, group_size,
                                           sums, sum_stride);
    case DType::kF16:
      return AccumulateRowsOf<DType::kF16>(rows, row_count, dim, weights, weight_stride, group_size,
                                           sums, sum_stride);
    case DType::kBF16:
      return AccumulateRowsOf<DType::kBF16>(rows, row_count, dim, weights, weight_stride,
                                            group_size, sums, sum_stride);
  }
}

// The rows at work go through the first-level cache once for each few columns, while the next ones
// are requested.
void AccumulateMeans(const int8_t* codes, const uint32_t* rows, size_t row_count, size_t dim,
                     const float* weights, size_t weight_stride, size_t group_size, float* sums,
                     size_t sum_stride) {
  constexpr size_t kRowsAtWork = 32, kLineBytes = 64;
  constexpr int kForReading = 0, kIntoSecondLevel = 2;
  const auto* bytes = reinterpret_cast<const uint8_t*>(codes);
  for (size_t first = 0; first < row_count; first += kRowsAtWork) {
    const size_t left = row_count - first;
    const size_t count = left < kRowsAtWork ? left : kRowsAtWork;
    for (size_t i = count; i < left && i < 2 * kRowsAtWork; ++i) {
      const uint8_t* next = bytes + rows[first + i] * dim;
      for (size_t j = 0; j < dim; j += kLineBytes) {
        __builtin_prefetch(next + j, kForReading, kIntoSecondLevel);
      }
    }
    const ListedMeans means = {{bytes, dim, rows + first}};
    Accumulate(means, count, dim, weights, weight_stride, group_size, sums, sum_stride);
  }
}

void AccumulateCodes(const uint8_t* codes, const uint32_t* rows, size_t row_count, size_t dim,
                     const float* weights, size_t weight_stride, size_t group_size, float* sums,
                     size_t sum_stride) {
  const size_t half = SketchRowBytes(dim);
  const ListedRows listed = {codes, half, rows};
  Accumulate(ListedCodes<false>{listed}, row_count, half, weights, weight_stride, group_size, sums,
             sum_stride);
  Accumulate(ListedCodes<true>{listed}, row_count, dim - half, weights, weight_stride, group_size,
             sums + half, sum_stride);
}

void FillAccumulate(Kernels* kernels) {
  kernels->accumulate_rows = &AccumulateRows;
  kernels->accumulate_means = &AccumulateMeans;
  kernels->accumulate_codes = &AccumulateCodes;
}

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {

HWY_EXPORT(FillAccumulate);

void SetAccumulateKernels(Kernels* kernels) { HWY_DYNAMIC_DISPATCH(FillAccumulate)(kernels); }

}  // namespace wavekv::simd
#endif  // HWY_ONCE
