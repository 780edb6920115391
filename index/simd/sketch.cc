// Scores of 4-bit codes (index/token_sketch.h).
// Compiled once for each target by Highway's foreach_target; see kernels.h for what each loop does.
#include <cstring>

#include "index/simd/kernel_parts.h"
#include "index/simd/targets.h"
#include "index/token_sketch.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index/simd/sketch.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// Per-target headers come after it.
#include "index/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {

// The codes of kLanes bytes about their middle: dims b ... of the row's first half and of its
// second.
struct CodePair {
  V low;
  V high;
};

HWY_INLINE CodePair LoadCodes(const uint8_t* HWY_RESTRICT bytes) {
  const hn::Rebind<uint8_t, D> d8;
  const hn::Rebind<int32_t, D> d32;
  const hn::Rebind<uint32_t, D> du32;
  const auto both = hn::PromoteTo(du32, hn::LoadU(d8, bytes));
  const V middle = hn::Set(kD, kSketchCodeMiddle);
  const auto low = hn::BitCast(d32, hn::And(both, hn::Set(du32, kSketchCodeMax)));
  const auto high = hn::BitCast(d32, hn::ShiftRight<kSketchBits>(both));
  return {hn::Sub(hn::ConvertTo(kD, low), middle), hn::Sub(hn::ConvertTo(kD, high), middle)};
}

// The first `count` < kLanes bytes; what follows is of no meaning.
HWY_INLINE CodePair LoadFewCodes(const uint8_t* HWY_RESTRICT bytes, size_t count) {
  alignas(64) uint8_t padded[kLanes] = {};
  std::memcpy(padded, bytes, count);
  return LoadCodes(padded);
}

HWY_INLINE float StepOf(const uint16_t* steps, size_t row) {
  const uint32_t bits = uint32_t{steps[row]} << 16;
  float step;
  std::memcpy(&step, &bits, sizeof(step));
  return step;
}

template <size_t kHeads>
HWY_INLINE void DotCodesOfRow(const float* HWY_RESTRICT queries, size_t dim,
                              const uint8_t* HWY_RESTRICT row, float factor,
                              float* HWY_RESTRICT scores, size_t score_stride) {
  const size_t half = SketchRowBytes(dim);
  V sums[kHeads][2];
  for (auto& sum : sums) sum[0] = sum[1] = hn::Zero(kD);
  size_t b = 0;
  // The second half may be one dim shorter: a whole vector of it ends before dim.
  for (; b + kLanes <= dim - half; b += kLanes) {
    const CodePair codes = LoadCodes(row + b);
    for (size_t g = 0; g < kHeads; ++g) {
      sums[g][0] = hn::MulAdd(hn::LoadU(kD, queries + g * dim + b), codes.low, sums[g][0]);
      sums[g][1] = hn::MulAdd(hn::LoadU(kD, queries + g * dim + half + b), codes.high, sums[g][1]);
    }
  }
  for (; b < half; b += kLanes) {
    const size_t low = half - b < kLanes ? half - b : kLanes;
    const size_t high = dim - half - b < low ? dim - half - b : low;
    const CodePair codes = LoadFewCodes(row + b, low);
    for (size_t g = 0; g < kHeads; ++g) {
      sums[g][0] = hn::MulAdd(LoadFew(queries + g * dim + b, low), codes.low, sums[g][0]);
      sums[g][1] = hn::MulAdd(LoadFew(queries + g * dim + half + b, high), codes.high, sums[g][1]);
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    float* const score = scores + g * score_stride;
    const float added = factor * HorizontalSum(hn::Add(sums[g][0], sums[g][1]));
    *score = hn::GetLane(ClampScore(hn::Set(kD, *score + added)));
  }
}

template <size_t kHeads>
void DotCodesOfHeads(const float* queries, size_t dim, const uint8_t* codes, const uint16_t* steps,
                     size_t row_count, float scale, float* scores, size_t score_stride) {
  const size_t row_bytes = SketchRowBytes(dim);
  for (size_t r = 0; r < row_count; ++r) {
    DotCodesOfRow<kHeads>(queries, dim, codes + r * row_bytes, scale * StepOf(steps, r), scores + r,
                          score_stride);
  }
}

void AddCodeDots(const float* queries, size_t group_size, size_t dim, const uint8_t* codes,
                 const uint16_t* steps, size_t row_count, float scale, float* scores,
                 size_t score_stride) {
  for (size_t g = 0; g < group_size; g += kHeadsPerPass) {
    const float* const q = queries + g * dim;
    float* const out = scores + g * score_stride;
    switch (group_size - g) {
      case 1:
        DotCodesOfHeads<1>(q, dim, codes, steps, row_count, scale, out, score_stride);
        break;
      case 2:
        DotCodesOfHeads<2>(q, dim, codes, steps, row_count, scale, out, score_stride);
        break;
      case 3:
        DotCodesOfHeads<3>(q, dim, codes, steps, row_count, scale, out, score_stride);
        break;
      default:
        DotCodesOfHeads<kHeadsPerPass>(q, dim, codes, steps, row_count, scale, out, score_stride);
    }
  }
}

void FillSketch(Kernels* kernels) { kernels->add_code_dots = &AddCodeDots; }

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {

HWY_EXPORT(FillSketch);

void SetSketchKernels(Kernels* kernels) { HWY_DYNAMIC_DISPATCH(FillSketch)(kernels); }

}  // namespace wavekv::simd
#endif  // HWY_ONCE
