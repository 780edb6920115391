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

// What the masses of a vector of clusters, or of `few` < kLanes, have in common for all heads.
struct ClusterVector {
  V log_size, deviation, reached;  // Deviation of the logits for a reach of 1; sqrt(2 ln n).

  HWY_INLINE ClusterVector(const float* key_spreads, const float* log_sizes, size_t few) {
    // Far beyond what makes a difference, and small enough to multiply.
    const V largest = hn::Set(kD, 1e30f);
    deviation = hn::Sqrt(
        hn::Min(few == 0 ? hn::LoadU(kD, key_spreads) : LoadFew(key_spreads, few), largest));
    log_size = few == 0 ? hn::LoadU(kD, log_sizes) : LoadFew(log_sizes, few);
    reached = hn::Sqrt(hn::Add(log_size, log_size));
  }

  HWY_INLINE V LogMass(V score, V reach) const {
    const V half = hn::Set(kD, 0.5f);
    const V s = hn::Mul(reach, deviation);
    const V many = hn::Mul(half, hn::Mul(s, s));
    const V few_tokens = hn::Sub(hn::Mul(s, reached), log_size);
    const V normal = hn::IfThenElse(hn::Le(s, reached), many, few_tokens);
    const V gain = hn::Mul(half, hn::Min(normal, s));
    return ClampScore(hn::Add(score, hn::Add(log_size, gain)));
  }
};

template <size_t kHeads>
void EstimateHeads(const float* scores, size_t stride, const float* key_spreads,
                   const float* log_sizes, const float* reach_squares, size_t n, float* log_masses,
                   float* tops) {
  V reaches[kHeads], largest[kHeads];
  for (size_t g = 0; g < kHeads; ++g) {
    reaches[g] = hn::Sqrt(hn::Set(kD, reach_squares[g]));
    largest[g] = hn::Set(kD, tops[g]);
  }
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const ClusterVector clusters(key_spreads + i, log_sizes + i, 0);
    for (size_t g = 0; g < kHeads; ++g) {
      const V mass = clusters.LogMass(hn::LoadU(kD, scores + g * stride + i), reaches[g]);
      hn::StoreU(mass, kD, log_masses + g * stride + i);
      largest[g] = hn::Max(largest[g], mass);
    }
  }
  const size_t few = n - i;
  for (size_t g = 0; g < kHeads; ++g) {
    tops[g] = hn::GetLane(hn::MaxOfLanes(kD, largest[g]));
    if (few == 0) continue;
    const ClusterVector clusters(key_spreads + i, log_sizes + i, few);
    float* const masses = log_masses + g * stride + i;
    StoreFew(clusters.LogMass(LoadFew(scores + g * stride + i, few), reaches[g]), masses, few);
    for (size_t k = 0; k < few; ++k) tops[g] = masses[k] > tops[g] ? masses[k] : tops[g];
  }
}

void EstimateLogMasses(const float* scores, size_t stride, size_t group_size,
                       const float* key_spreads, const float* log_sizes, const float* reach_squares,
                       size_t n, float* log_masses, float* tops) {
  size_t g = 0;
  for (; g + kHeadsPerPass <= group_size; g += kHeadsPerPass) {
    EstimateHeads<kHeadsPerPass>(scores + g * stride, stride, key_spreads, log_sizes,
                                 reach_squares + g, n, log_masses + g * stride, tops + g);
  }
  for (; g < group_size; ++g) {
    EstimateHeads<1>(scores + g * stride, stride, key_spreads, log_sizes, reach_squares + g, n,
                     log_masses + g * stride, tops + g);
  }
}

float Dot(const float* a, const float* b, size_t n) {
  V sum = hn::Zero(kD);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    sum = hn::MulAdd(hn::LoadU(kD, a + i), hn::LoadU(kD, b + i), sum);
  }
  if (i < n) sum = hn::MulAdd(LoadFew(a + i, n - i), LoadFew(b + i, n - i), sum);
  return HorizontalSum(sum);
}

void Combine(const float* x, size_t stride, size_t group_size, const float* factors,
             const float* mask, size_t n, float* out) {
  for (size_t i = 0; i < n; i += kLanes) {
    const size_t few = n - i < kLanes ? n - i : 0;
    V sum = hn::Zero(kD);
    for (size_t g = 0; g < group_size; ++g) {
      const float* source = x + g * stride + i;
      const V value = few == 0 ? hn::LoadU(kD, source) : LoadFew(source, few);
      sum = hn::MulAdd(hn::Set(kD, factors[g]), value, sum);
    }
    const V masked = hn::Mul(sum, few == 0 ? hn::LoadU(kD, mask + i) : LoadFew(mask + i, few));
    if (few == 0) {
      hn::StoreU(masked, kD, out + i);
    } else {
      StoreFew(masked, out + i, few);
    }
  }
}

void SumsBelow(const float* x, size_t n, const float* thresholds, size_t threshold_count,
               float* sums) {
  for (size_t k = 0; k < threshold_count; ++k) {
    const V threshold = hn::Set(kD, thresholds[k]);
    V sum = hn::Zero(kD);
    for (size_t i = 0; i < n; i += kLanes) {
      const V value = n - i < kLanes ? LoadFew(x + i, n - i) : hn::LoadU(kD, x + i);
      sum = hn::Add(sum, hn::IfThenElseZero(hn::Lt(value, threshold), value));
    }
    sums[k] += HorizontalSum(sum);
  }
}

size_t ListReaching(const float* x, size_t stride, size_t group_size, const float* thresholds,
                    size_t n, uint32_t* list) {
  const hn::RebindToUnsigned<D> du;
  size_t count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    auto reaches = hn::Ge(hn::LoadU(kD, x + i), hn::Set(kD, thresholds[0]));
    for (size_t g = 1; g < group_size; ++g) {
      const V value = hn::LoadU(kD, x + g * stride + i);
      reaches = hn::Or(reaches, hn::Ge(value, hn::Set(kD, thresholds[g])));
    }
    // No more than i are listed by now: a whole vector has room.
    const auto places = hn::Iota(du, static_cast<uint32_t>(i));
    hn::StoreU(hn::Compress(places, hn::RebindMask(du, reaches)), du, list + count);
    count += hn::CountTrue(kD, reaches);
  }
  for (; i < n; ++i) {
    bool reaches = false;
    for (size_t g = 0; g < group_size; ++g) reaches |= x[g * stride + i] >= thresholds[g];
    list[count] = static_cast<uint32_t>(i);
    count += reaches ? 1 : 0;
  }
  return count;
}

void Scale(float* x, size_t n, float factor) {
  const V factor_v = hn::Set(kD, factor);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(kD, x + i), factor_v), kD, x + i);
  }
  for (; i < n; ++i) x[i] *= factor;
}

// See Kernels::rank_clusters: exp(3 v / 8 - min(v / 2, sqrt(v)) / 2), the fourth power of its
// root's first terms.
HWY_INLINE V TailFactor(V v) {
  const V one = hn::Set(kD, 1.0f), half = hn::Set(kD, 0.5f), sixth = hn::Set(kD, 1.0f / 6);
  const V gain = hn::Min(hn::Mul(half, v), hn::Sqrt(v));
  const V y = hn::Sub(hn::Mul(hn::Set(kD, 3.0f / 32), v), hn::Mul(hn::Set(kD, 0.125f), gain));
  const V root = hn::MulAdd(y, hn::MulAdd(y, hn::MulAdd(y, sixth, half), one), one);
  const V square = hn::Mul(root, root);
  return hn::Mul(square, square);
}

// Clusters from `i` on: a vector of them, or `few` < kLanes.
HWY_INLINE void RankVector(const RankFactors& factors, const float* weights, size_t stride,
                           const float* key_spreads, const float* value_spreads, size_t few,
                           float* mass_share, float* rank) {
  constexpr float kVarianceMax = 64.0f, kSixth = 1.0f / 6;
  const auto load = [few](const float* x)
                        HWY_ATTR { return few == 0 ? hn::LoadU(kD, x) : LoadFew(x, few); };
  const V spread = load(key_spreads), one = hn::Set(kD, 1.0f);
  V shares = hn::Zero(kD), misjudged = hn::Zero(kD);
  for (size_t g = 0; g < factors.share.size(); ++g) {
    const V weight = load(weights + g * stride);
    const V v =
        hn::Min(hn::Mul(hn::Set(kD, factors.reach_squares[g]), spread), hn::Set(kD, kVarianceMax));
    const V grown =
        hn::Mul(v, hn::MulAdd(v, hn::MulAdd(v, hn::Set(kD, kSixth), hn::Set(kD, 0.5f)), one));
    const V deviation = hn::Sqrt(hn::Div(grown, hn::Add(grown, one)));
    shares = hn::MulAdd(hn::Set(kD, factors.share[g]), weight, shares);
    const V risked = hn::Mul(hn::Mul(hn::Set(kD, factors.rank[g]), weight), TailFactor(v));
    misjudged = hn::MulAdd(risked, deviation, misjudged);
  }
  misjudged = hn::Mul(misjudged, load(value_spreads));
  if (few == 0) {
    hn::StoreU(shares, kD, mass_share);
    hn::StoreU(misjudged, kD, rank);
  } else {
    StoreFew(shares, mass_share, few);
    StoreFew(misjudged, rank, few);
  }
}

void RankClusters(const RankFactors& factors, const float* weights, size_t stride,
                  const float* key_spreads, const float* value_spreads, size_t n, float* mass_share,
                  float* rank) {
  for (size_t i = 0; i < n; i += kLanes) {
    const size_t few = n - i < kLanes ? n - i : 0;
    RankVector(factors, weights + i, stride, key_spreads + i, value_spreads + i, few,
               mass_share + i, rank + i);
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
  kernels->estimate_log_masses = &EstimateLogMasses;
  kernels->scale = &Scale;
  kernels->dot = &Dot;
  kernels->combine = &Combine;
  kernels->sums_below = &SumsBelow;
  kernels->list_reaching = &ListReaching;
  kernels->rank_clusters = &RankClusters;
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
