// Sums of rows by weight, for a few query heads at a time.
// Compiled once for each target by Highway's foreach_target; see kernels.h for what each loop does.
#include "index/simd/kernel_parts.h"
#include "index/simd/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index/simd/accumulate.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// Per-target headers come after it.
#include "index/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {

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

void FillAccumulate(Kernels* kernels) { kernels->accumulate_rows = &AccumulateRows; }

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {

HWY_EXPORT(FillAccumulate);

void SetAccumulateKernels(Kernels* kernels) { HWY_DYNAMIC_DISPATCH(FillAccumulate)(kernels); }

}  // namespace wavekv::simd
#endif  // HWY_ONCE
