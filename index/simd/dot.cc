// Scores: dot products of a few queries with many rows.
// Compiled once for each target by Highway's foreach_target; see kernels.h for what each loop does.
#include "index/simd/kernel_parts.h"
#include "index/simd/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index/simd/dot.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// Per-target headers come after it.
#include "index/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {

constexpr size_t kRowsPerPass = 4;

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

void FillDot(Kernels* kernels) { kernels->dot_rows = &DotRows; }

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {

HWY_EXPORT(FillDot);

void SetDotKernels(Kernels* kernels) { HWY_DYNAMIC_DISPATCH(FillDot)(kernels); }

}  // namespace wavekv::simd
#endif  // HWY_ONCE
