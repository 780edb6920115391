// Loops over arrays: conversions, exponentials, sums.
// Compiled once for each target by Highway's foreach_target; see kernels.h for what each loop does.
#include <cstring>
#include <limits>

#include "index/simd/kernel_parts.h"
#include "index/simd/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index/simd/elementwise.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// Per-target headers come after it.
#include "hwy/contrib/math/math-inl.h"
#include "index/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {

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

void FillElementwise(Kernels* kernels) {
  kernels->max = &Max;
  kernels->exp_sum = &ExpSum;
  kernels->add = &AddArrays;
  kernels->scale = &Scale;
  kernels->multiply_add = &MultiplyAdd;
  kernels->add_misjudged = &AddMisjudged;
  kernels->to_float = &ToFloat;
}

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {

HWY_EXPORT(FillElementwise);

void SetElementwiseKernels(Kernels* kernels) { HWY_DYNAMIC_DISPATCH(FillElementwise)(kernels); }

}  // namespace wavekv::simd
#endif  // HWY_ONCE
