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

#if HWY_TARGET == HWY_SCALAR

template <size_t kRows>
HWY_INLINE void StoreScores(const V (&sums)[kRows], float scale, float* HWY_RESTRICT scores) {
  for (size_t r = 0; r < kRows; ++r) {
    scores[r] = hn::GetLane(ClampScore(hn::Mul(sums[r], hn::Set(kD, scale))));
  }
}

#else

// The sum of a vector's blocks of four lanes.
template <class BlocksD>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> AddBlocks(BlocksD d, hn::Vec<BlocksD> v) {
  if constexpr (hn::MaxLanes(d) <= 4) {
    return v;
  } else {
    const hn::Half<BlocksD> half;
    return AddBlocks(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// Scores of kRows <= 4 rows from their sums, lane by lane. The rows are added up together, each in
// the same order whatever their number: within blocks of four lanes, then across the blocks.
template <size_t kRows>
HWY_INLINE void StoreScores(const V (&sums)[kRows], float scale, float* HWY_RESTRICT scores) {
  static_assert(kRows <= kRowsPerPass && kRowsPerPass == 4);
  const hn::CappedTag<float, 4> d4;
  const hn::Repartition<double, D> d64;
  V row[4] = {hn::Zero(kD), hn::Zero(kD), hn::Zero(kD), hn::Zero(kD)};
  for (size_t r = 0; r < kRows; ++r) row[r] = sums[r];
  // In each block first (a0 + a2, b0 + b2, a1 + a3, b1 + b3), then (a, b, c, d).
  const V ab =
      hn::Add(hn::InterleaveLower(kD, row[0], row[1]), hn::InterleaveUpper(kD, row[0], row[1]));
  const V cd =
      hn::Add(hn::InterleaveLower(kD, row[2], row[3]), hn::InterleaveUpper(kD, row[2], row[3]));
  const auto ab64 = hn::BitCast(d64, ab), cd64 = hn::BitCast(d64, cd);
  const V blocks = hn::Add(hn::BitCast(kD, hn::InterleaveLower(d64, ab64, cd64)),
                           hn::BitCast(kD, hn::InterleaveUpper(d64, ab64, cd64)));
  const auto scaled = hn::Mul(AddBlocks(kD, blocks), hn::Set(d4, scale));
  // As ClampScore.
  const auto clamped = hn::Min(hn::Max(scaled, hn::Set(d4, -kScoreMax)), hn::Set(d4, kScoreMax));
  if constexpr (kRows == 4) {
    hn::StoreU(clamped, d4, scores);
  } else {
    alignas(16) float lanes[4];
    hn::Store(clamped, d4, lanes);
    for (size_t r = 0; r < kRows; ++r) scores[r] = lanes[r];
  }
}

#endif

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
    StoreScores<kRows>(sums[g], scale, scores + g * score_stride);
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
