// AVX512-VNNI over the plain AVX-512 level: products of bytes, four at a time, added up exactly.
//
// Written with intrinsics in functions of their own target: this file is compiled for any x86.
#include "index/segment.h"
#include "index/simd/kernel_parts.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>
#include <limits>

namespace wavekv::simd {
namespace {

#define WAVEKV_TARGET_VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")))

static_assert(kPanelClusters == 16 && kPanelDims == 4, "a vector holds a panel's four dims");

WAVEKV_TARGET_VNNI inline __m512i BroadcastFour(const int8_t* digits) {
  int32_t four;
  std::memcpy(&four, digits, sizeof(four));
  return _mm512_set1_epi32(four);
}

// Scores of `count` <= 16 clusters from the sums over their codes' high and low products.
WAVEKV_TARGET_VNNI inline void StoreScores(__m512i sums, const float* scales, size_t count,
                                           float base, float factor, float* scores) {
  const auto lanes = static_cast<__mmask16>((1u << count) - 1);
  const __m512 scale = _mm512_maskz_loadu_ps(lanes, scales);
  // Finite, so that a sum of 0 stays 0; the maximum comes first to turn NaN into -kScoreMax.
  const __m512 unit = _mm512_min_ps(_mm512_mul_ps(_mm512_set1_ps(factor), scale),
                                    _mm512_set1_ps(std::numeric_limits<float>::max()));
  const __m512 score = _mm512_fmadd_ps(unit, _mm512_cvtepi32_ps(sums), _mm512_set1_ps(base));
  const __m512 clamped =
      _mm512_min_ps(_mm512_max_ps(score, _mm512_set1_ps(-kScoreMax)), _mm512_set1_ps(kScoreMax));
  _mm512_mask_storeu_ps(scores, lanes, clamped);
}

// kPanels panels against kHeads queries, which keeps enough sums under way for the latency.
template <size_t kHeads, size_t kPanels>
WAVEKV_TARGET_VNNI void DotSomePanels(const QueryCodes& queries, size_t first_head,
                                      const uint8_t* panels, size_t count, const float* scales,
                                      const float* bases, const float* factors, float* scores,
                                      size_t score_stride) {
  const size_t padded_dim = queries.padded_dim;
  const int8_t* high = queries.high.data() + first_head * padded_dim;
  const int8_t* low = queries.low.data() + first_head * padded_dim;
  __m512i high_sums[kHeads][kPanels], low_sums[kHeads][kPanels];
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t p = 0; p < kPanels; ++p) {
      high_sums[g][p] = _mm512_setzero_si512();
      // What the codes' zero point adds is taken off here.
      low_sums[g][p] = _mm512_set1_epi32(-int32_t{kKeyCodeZero} * queries.sums[first_head + g]);
    }
  }
  for (size_t j = 0; j < padded_dim; j += kPanelDims) {
    __m512i codes[kPanels];
    for (size_t p = 0; p < kPanels; ++p) {
      codes[p] = _mm512_loadu_si512(panels + (p * padded_dim + j) * kPanelClusters);
    }
    for (size_t g = 0; g < kHeads; ++g) {
      const __m512i high_digits = BroadcastFour(high + g * padded_dim + j);
      const __m512i low_digits = BroadcastFour(low + g * padded_dim + j);
      for (size_t p = 0; p < kPanels; ++p) {
        high_sums[g][p] = _mm512_dpbusd_epi32(high_sums[g][p], codes[p], high_digits);
        low_sums[g][p] = _mm512_dpbusd_epi32(low_sums[g][p], codes[p], low_digits);
      }
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    const size_t head = first_head + g;
    for (size_t p = 0; p < kPanels; ++p) {
      const size_t first = p * kPanelClusters;
      if (first >= count) break;
      const size_t here = count - first < kPanelClusters ? count - first : kPanelClusters;
      const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(high_sums[g][p], 8), low_sums[g][p]);
      StoreScores(sums, scales + first, here, bases[head], factors[head],
                  scores + head * score_stride + first);
    }
  }
}

template <size_t kHeads, size_t kPanels>
WAVEKV_TARGET_VNNI void DotHeads(const QueryCodes& queries, size_t first_head,
                                 const uint8_t* panels, size_t row_count, const float* scales,
                                 const float* bases, const float* factors, float* scores,
                                 size_t score_stride) {
  constexpr size_t kStep = kPanels * kPanelClusters;
  size_t first = 0;
  for (; first + kStep <= row_count; first += kStep) {
    DotSomePanels<kHeads, kPanels>(queries, first_head, panels + first * queries.padded_dim, kStep,
                                   scales + first, bases, factors, scores + first, score_stride);
  }
  for (; first < row_count; first += kPanelClusters) {
    const size_t count = row_count - first < kPanelClusters ? row_count - first : kPanelClusters;
    DotSomePanels<kHeads, 1>(queries, first_head, panels + first * queries.padded_dim, count,
                             scales + first, bases, factors, scores + first, score_stride);
  }
}

void DotPanels(const QueryCodes& queries, const uint8_t* panels, size_t row_count,
               const float* scales, const float* bases, const float* factors, float* scores,
               size_t score_stride) {
  for (size_t g = 0; g < queries.group_size; g += 4) {
    switch (queries.group_size - g) {
      case 1:
        DotHeads<1, 4>(queries, g, panels, row_count, scales, bases, factors, scores, score_stride);
        break;
      case 2:
        DotHeads<2, 4>(queries, g, panels, row_count, scales, bases, factors, scores, score_stride);
        break;
      case 3:
        DotHeads<3, 2>(queries, g, panels, row_count, scales, bases, factors, scores, score_stride);
        break;
      default:
        DotHeads<4, 2>(queries, g, panels, row_count, scales, bases, factors, scores, score_stride);
    }
  }
}

}  // namespace

bool SetVnniKernels(Kernels* kernels) {
  if (!__builtin_cpu_supports("avx512vnni")) return false;
  kernels->isa = "avx512_vnni";
  kernels->dot_panels = &DotPanels;
  return true;
}

}  // namespace wavekv::simd

#else

namespace wavekv::simd {

bool SetVnniKernels(Kernels*) { return false; }

}  // namespace wavekv::simd

#endif
