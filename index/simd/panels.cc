// Scores of 8-bit rows in panels.
// Compiled once for each target by Highway's foreach_target; see kernels.h for what each loop does.
#include <cstring>
#include <limits>

#include "index/segment.h"
#include "index/simd/kernel_parts.h"
#include "index/simd/targets.h"
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "index/simd/panels.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
#include "hwy/highway.h"
// Per-target headers come after it.
#include "index/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace wavekv::simd::HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3

using D16 = hn::ScalableTag<int16_t>;
using D32 = hn::ScalableTag<int32_t>;
// Each vector holds the 16-bit products' operands of so many clusters, kPanelDims dims of each.
constexpr size_t kVectorClusters = 2 * kLanes / kPanelDims;
constexpr size_t kPanelVectors = kPanelClusters / kVectorClusters;
constexpr size_t kCodeHeadsPerPass = kManyRegisters ? 4 : 2;

// Adds the products of one panel with kHeads queries to totals[kHeads][kPanelClusters].
template <size_t kHeads>
HWY_INLINE void MultiplyPanel(const uint8_t* HWY_RESTRICT panel, const int16_t* HWY_RESTRICT query,
                              size_t padded_dim, uint32_t (*HWY_RESTRICT totals)[kPanelClusters]) {
  const D16 d16;
  const D32 d32;
  const hn::ScalableTag<int64_t> d64;
  const hn::Rebind<uint8_t, D16> d8;
  hn::Vec<D32> sums[kHeads][kPanelVectors];
  for (auto& head : sums) {
    for (auto& sum : head) sum = hn::Zero(d32);
  }
  auto unused = hn::Zero(d32);
  for (size_t j = 0; j < padded_dim; j += kPanelDims) {
    for (size_t v = 0; v < kPanelVectors; ++v) {
      const uint8_t* codes = panel + (j * kPanelClusters + v * kVectorClusters * kPanelDims);
      const auto wide = hn::PromoteTo(d16, hn::LoadU(d8, codes));
      for (size_t g = 0; g < kHeads; ++g) {
        int64_t four;
        std::memcpy(&four, query + g * padded_dim + j, sizeof(four));
        const auto factors = hn::BitCast(d16, hn::Set(d64, four));
        sums[g][v] = hn::ReorderWidenMulAccumulate(d32, wide, factors, sums[g][v], unused);
      }
    }
  }
  // Two sums of pairs belong to each cluster.
  const hn::RebindToUnsigned<D32> du;
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t v = 0; v < kPanelVectors; v += 2) {
      const auto both =
          hn::ConcatEven(d32, hn::Add(sums[g][v + 1], hn::Shuffle2301(sums[g][v + 1])),
                         hn::Add(sums[g][v], hn::Shuffle2301(sums[g][v])));
      uint32_t* total = totals[g] + v * kVectorClusters;
      hn::StoreU(hn::Add(hn::LoadU(du, total), hn::BitCast(du, both)), du, total);
    }
  }
}

#else

constexpr size_t kCodeHeadsPerPass = 1;

template <size_t kHeads>
HWY_INLINE void MultiplyPanel(const uint8_t* HWY_RESTRICT panel, const int16_t* HWY_RESTRICT query,
                              size_t padded_dim, uint32_t (*HWY_RESTRICT totals)[kPanelClusters]) {
  static_assert(kHeads == 1);
  for (size_t j = 0; j < padded_dim; ++j) {
    const auto factor = static_cast<uint32_t>(static_cast<int32_t>(query[j]));
    const uint8_t* codes = panel + j / kPanelDims * kPanelDims * kPanelClusters + j % kPanelDims;
    for (size_t c = 0; c < kPanelClusters; ++c) totals[0][c] += factor * codes[c * kPanelDims];
  }
}

#endif

// The scores of up to a panel's clusters from the sums of their codes' products.
HWY_INLINE void ScorePanel(const uint32_t* HWY_RESTRICT totals, const float* HWY_RESTRICT scales,
                           size_t count, float base, float factor, float* HWY_RESTRICT scores) {
  const hn::RebindToSigned<D> di;
  const V largest = hn::Set(kD, std::numeric_limits<float>::max());
  for (size_t c = 0; c < count; c += kLanes) {
    const size_t few = count - c < kLanes ? count - c : kLanes;
    const V scale = few == kLanes ? hn::LoadU(kD, scales + c) : LoadFew(scales + c, few);
    const V sum = hn::ConvertTo(kD, hn::LoadU(di, reinterpret_cast<const int32_t*>(totals + c)));
    // Finite, so that a sum of 0 stays 0.
    const V unit = hn::Min(hn::Mul(hn::Set(kD, factor), scale), largest);
    const V score = ClampScore(hn::MulAdd(unit, sum, hn::Set(kD, base)));
    if (few == kLanes) {
      hn::StoreU(score, kD, scores + c);
    } else {
      StoreFew(score, scores + c, few);
    }
  }
}

template <size_t kHeads>
void DotPanelsHeads(const QueryCodes& queries, size_t first_head, const uint8_t* panels,
                    size_t row_count, const float* scales, const float* bases, const float* factors,
                    float* scores, size_t score_stride) {
  const size_t padded_dim = queries.padded_dim;
  for (size_t first = 0; first < row_count; first += kPanelClusters) {
    const size_t count = row_count - first < kPanelClusters ? row_count - first : kPanelClusters;
    alignas(64) uint32_t totals[kHeads][kPanelClusters];
    for (size_t g = 0; g < kHeads; ++g) {
      // What the codes' zero point adds is taken off here.
      const uint32_t start =
          0u - kKeyCodeZero * static_cast<uint32_t>(queries.sums[first_head + g]);
      for (uint32_t& total : totals[g]) total = start;
    }
    MultiplyPanel<kHeads>(panels + first * padded_dim,
                          queries.codes.data() + first_head * padded_dim, padded_dim, totals);
    for (size_t g = 0; g < kHeads; ++g) {
      const size_t head = first_head + g;
      ScorePanel(totals[g], scales + first, count, bases[head], factors[head],
                 scores + head * score_stride + first);
    }
  }
}

void DotPanels(const QueryCodes& queries, const uint8_t* panels, size_t row_count,
               const float* scales, const float* bases, const float* factors, float* scores,
               size_t score_stride) {
  size_t g = 0;
  for (; g + kCodeHeadsPerPass <= queries.group_size; g += kCodeHeadsPerPass) {
    DotPanelsHeads<kCodeHeadsPerPass>(queries, g, panels, row_count, scales, bases, factors, scores,
                                      score_stride);
  }
  for (; g < queries.group_size; ++g) {
    DotPanelsHeads<1>(queries, g, panels, row_count, scales, bases, factors, scores, score_stride);
  }
}

void FillPanels(Kernels* kernels) { kernels->dot_panels = &DotPanels; }

}  // namespace wavekv::simd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace wavekv::simd {

HWY_EXPORT(FillPanels);

void SetPanelKernels(Kernels* kernels) { HWY_DYNAMIC_DISPATCH(FillPanels)(kernels); }

}  // namespace wavekv::simd
#endif  // HWY_ONCE
