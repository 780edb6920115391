// What the loops of every file share: vectors of floats, loads from each dtype, the ends of rows.
// Included once for each target, by Highway's rule for such headers.
#include <cstdint>
#include <cstring>

#include "storage/base/dtype.h"

#if defined(WAVEKV_INDEX_SIMD_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WAVEKV_INDEX_SIMD_VECTOR_INL_H_
#undef WAVEKV_INDEX_SIMD_VECTOR_INL_H_
#else
#define WAVEKV_INDEX_SIMD_VECTOR_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr D kD;
constexpr size_t kLanes = HWY_LANES(float);
// Enough registers for 16 accumulators and their operands?
constexpr bool kManyRegisters = HWY_TARGET <= HWY_AVX3;
// Query heads that one pass over the rows serves.
constexpr size_t kHeadsPerPass = 4;

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

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // WAVEKV_INDEX_SIMD_VECTOR_INL_H_
