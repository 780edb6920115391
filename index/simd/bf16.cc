// AVX512-BF16 over the AVX-512 level: scores of bf16 rows for queries that are bf16 numbers, as
// they are when a bf16 model hands them over. Products are exact and sums are float, as in the
// plain loop; subnormal elements count as zero. Other queries take the plain loop.
//
// Written with intrinsics in functions of their own target: this file is compiled for any x86.
#include "index/simd/kernel_parts.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace wavekv::simd {
namespace {

#define WAVEKV_TARGET_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

constexpr size_t kLanes = 32;  // Of a vector of bf16.
constexpr size_t kHeadsMax = 4;
constexpr size_t kRowsPerPass = 4;
constexpr size_t kDimMax = 256;

// The plain loop; set before any call.
decltype(Kernels::dot_rows) plain_dot_rows = nullptr;

// Queries as bf16, padded with zeros to whole vectors.
struct PackedQueries {
  alignas(64) uint16_t values[kHeadsMax][kDimMax];
};

// Whether all of the query are bf16 numbers; packs them.
WAVEKV_TARGET_BF16 bool Pack(const float* query, size_t dim, uint16_t* packed) {
  __mmask16 inexact = 0;
  for (size_t j = 0; j < (dim + kLanes - 1) / kLanes * kLanes; j += 16) {
    const size_t left = j < dim ? dim - j : 0;
    const auto lanes = static_cast<__mmask16>(left < 16 ? (1u << left) - 1 : 0xffffu);
    const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(lanes, query + j));
    inexact |= _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xffff));
    _mm256_store_si256(reinterpret_cast<__m256i*>(packed + j),
                       _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
  }
  return inexact == 0;
}

WAVEKV_TARGET_BF16 inline __m512bh LoadRow(const uint16_t* row, __mmask32 lanes) {
  return (__m512bh)_mm512_maskz_loadu_epi16(lanes, row);
}

// Sums of four vectors' lanes, in order.
WAVEKV_TARGET_BF16 inline __m128 AddLanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d ab64 = _mm512_castps_pd(ab), cd64 = _mm512_castps_pd(cd);
  const __m512 blocks = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab64, cd64)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(ab64, cd64)));
  const __m256 halves =
      _mm256_add_ps(_mm512_castps512_ps256(blocks), _mm512_extractf32x8_ps(blocks, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// kRows <= 4 rows against kHeads packed queries.
template <size_t kHeads, size_t kRows>
WAVEKV_TARGET_BF16 inline void DotTile(const PackedQueries& queries, size_t dim,
                                       const uint16_t* rows, float scale, float* scores,
                                       size_t score_stride) {
  __m512 sums[kHeads][kRowsPerPass];
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t r = 0; r < kRowsPerPass; ++r) sums[g][r] = _mm512_setzero_ps();
  }
  for (size_t j = 0; j < dim; j += kLanes) {
    const size_t left = dim - j;
    const auto lanes = static_cast<__mmask32>(left < kLanes ? (1u << left) - 1 : 0xffffffffu);
    __m512bh keys[kRows];
    for (size_t r = 0; r < kRows; ++r) keys[r] = LoadRow(rows + r * dim + j, lanes);
    for (size_t g = 0; g < kHeads; ++g) {
      const auto query = (__m512bh)_mm512_load_si512(queries.values[g] + j);
      for (size_t r = 0; r < kRows; ++r) sums[g][r] = _mm512_dpbf16_ps(sums[g][r], query, keys[r]);
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    const __m128 total =
        _mm_mul_ps(AddLanes(sums[g][0], sums[g][1], sums[g][2], sums[g][3]), _mm_set1_ps(scale));
    // The maximum comes first to turn NaN into -kScoreMax.
    const __m128 clamped =
        _mm_min_ps(_mm_max_ps(total, _mm_set1_ps(-kScoreMax)), _mm_set1_ps(kScoreMax));
    _mm_mask_storeu_ps(scores + g * score_stride, static_cast<__mmask8>((1u << kRows) - 1),
                       clamped);
  }
}

template <size_t kHeads>
WAVEKV_TARGET_BF16 void DotHeads(const PackedQueries& queries, size_t dim, const uint16_t* rows,
                                 size_t row_count, float scale, float* scores,
                                 size_t score_stride) {
  size_t r = 0;
  for (; r + kRowsPerPass <= row_count; r += kRowsPerPass) {
    DotTile<kHeads, kRowsPerPass>(queries, dim, rows + r * dim, scale, scores + r, score_stride);
  }
  for (; r < row_count; ++r) {
    DotTile<kHeads, 1>(queries, dim, rows + r * dim, scale, scores + r, score_stride);
  }
}

void DotPacked(const PackedQueries& queries, size_t heads, size_t dim, const uint16_t* rows,
               size_t row_count, float scale, float* scores, size_t score_stride) {
  switch (heads) {
    case 0:
      return;
    case 1:
      return DotHeads<1>(queries, dim, rows, row_count, scale, scores, score_stride);
    case 2:
      return DotHeads<2>(queries, dim, rows, row_count, scale, scores, score_stride);
    case 3:
      return DotHeads<3>(queries, dim, rows, row_count, scale, scores, score_stride);
    default:
      return DotHeads<4>(queries, dim, rows, row_count, scale, scores, score_stride);
  }
}

void DotRows(DType dtype, const float* queries, size_t group_size, size_t dim, const void* rows,
             size_t row_count, float scale, float* scores, size_t score_stride) {
  if (dtype != DType::kBF16 || dim > kDimMax) {
    return plain_dot_rows(dtype, queries, group_size, dim, rows, row_count, scale, scores,
                          score_stride);
  }
  // Each head by itself: what others hold changes nothing of its scores.
  PackedQueries packed;
  const auto* bits = static_cast<const uint16_t*>(rows);
  size_t first = 0, count = 0;  // Heads that are packed and not yet done.
  for (size_t g = 0; g < group_size; ++g) {
    const bool exact = Pack(queries + g * dim, dim, packed.values[count]);
    if (exact) ++count;
    if (exact && count < kHeadsMax && g + 1 < group_size) continue;
    DotPacked(packed, count, dim, bits, row_count, scale, scores + first * score_stride,
              score_stride);
    if (!exact) {
      plain_dot_rows(dtype, queries + g * dim, 1, dim, rows, row_count, scale,
                     scores + g * score_stride, score_stride);
    }
    first = g + 1;
    count = 0;
  }
}

}  // namespace

bool SetBf16Kernels(Kernels* kernels) {
  if (!__builtin_cpu_supports("avx512bf16")) return false;
  plain_dot_rows = kernels->dot_rows;
  kernels->isa = "avx512_bf16";
  kernels->dot_rows = &DotRows;
  return true;
}

}  // namespace wavekv::simd

#else

namespace wavekv::simd {

bool SetBf16Kernels(Kernels*) { return false; }

}  // namespace wavekv::simd

#endif
