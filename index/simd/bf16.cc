// AVX512-BF16 over the AVX-512 level: scores of bf16 rows and of 4-bit codes for queries that are
// bf16 numbers, as they are when a bf16 model hands them over. Products are exact and sums are
// float, as in the plain loops; subnormal elements count as zero. Other queries take the plain
// loops.
//
// Written with intrinsics in functions of their own target: this file is compiled for any x86.
#include "index/simd/kernel_parts.h"
#include "index/token_sketch.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace wavekv::simd {
namespace {

#define WAVEKV_TARGET_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
// Inlined early, or GCC keeps the sums that it hands on in memory.
#define WAVEKV_INLINE_BF16 WAVEKV_TARGET_BF16 inline __attribute__((always_inline))

constexpr size_t kLanes = 32;  // Of a vector of bf16.
constexpr size_t kHeadsMax = 4;
constexpr size_t kRowsPerPass = 4;
constexpr size_t kDimMax = 256;

// The plain loops; set before any call.
decltype(Kernels::dot_rows) plain_dot_rows = nullptr;
decltype(Kernels::add_code_dots) plain_add_code_dots = nullptr;

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

WAVEKV_INLINE_BF16 __m512bh LoadRow(const uint16_t* row, __mmask32 lanes) {
  return (__m512bh)_mm512_maskz_loadu_epi16(lanes, row);
}

// Sums of four vectors' lanes, in order.
WAVEKV_INLINE_BF16 __m128 AddLanes(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d ab64 = _mm512_castps_pd(ab), cd64 = _mm512_castps_pd(cd);
  const __m512 blocks = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab64, cd64)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(ab64, cd64)));
  const __m256 halves =
      _mm256_add_ps(_mm512_castps512_ps256(blocks), _mm512_extractf32x8_ps(blocks, 1));
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// The maximum comes first to turn NaN into -kScoreMax.
WAVEKV_INLINE_BF16 __m128 ClampScores(__m128 scores) {
  return _mm_min_ps(_mm_max_ps(scores, _mm_set1_ps(-kScoreMax)), _mm_set1_ps(kScoreMax));
}

// The first `left` lanes of 32, or all.
WAVEKV_INLINE_BF16 __mmask32 FirstLanes(size_t left) {
  return static_cast<__mmask32>(left < kLanes ? (1u << left) - 1 : 0xffffffffu);
}

// `rows` 1 to 4 of them; those that are missing are read as the last one.
struct RowTile {
  const uint8_t* rows[kRowsPerPass];
  __mmask8 present;

  RowTile(const void* first, size_t row_bytes, size_t count)
      : present(static_cast<__mmask8>((1u << count) - 1)) {
    for (size_t r = 0; r < kRowsPerPass; ++r) {
      rows[r] = static_cast<const uint8_t*>(first) + (r < count ? r : count - 1) * row_bytes;
    }
  }
};

// Sums of products of one vector of each row with kHeads queries. `lanes` of the vector at column
// `j` count.
template <size_t kHeads>
WAVEKV_INLINE_BF16 void Multiply(const PackedQueries& queries, size_t j, __mmask32 lanes,
                                 const __m512bh (&keys)[kRowsPerPass],
                                 __m512 (&sums)[kHeads][kRowsPerPass]) {
  for (size_t g = 0; g < kHeads; ++g) {
    const __m512bh query = LoadRow(queries.values[g] + j, lanes);
    for (size_t r = 0; r < kRowsPerPass; ++r) {
      sums[g][r] = _mm512_dpbf16_ps(sums[g][r], query, keys[r]);
    }
  }
}

template <size_t kHeads>
WAVEKV_INLINE_BF16 void SetZero(__m512 (&sums)[kHeads][kRowsPerPass]) {
  for (auto& head : sums) {
    for (__m512& sum : head) sum = _mm512_setzero_ps();
  }
}

// bf16 rows.
struct StoredRows {
  const uint16_t* rows;
  float scale;

  template <size_t kHeads>
  WAVEKV_INLINE_BF16 void ScoreTile(const PackedQueries& queries, size_t dim, size_t first,
                                    size_t count, float* scores, size_t score_stride) const {
    const RowTile tile(rows + first * dim, 2 * dim, count);
    __m512 sums[kHeads][kRowsPerPass];
    SetZero(sums);
    for (size_t j = 0; j < dim; j += kLanes) {
      const __mmask32 lanes = FirstLanes(dim - j);
      __m512bh keys[kRowsPerPass];
      for (size_t r = 0; r < kRowsPerPass; ++r) {
        keys[r] = LoadRow(reinterpret_cast<const uint16_t*>(tile.rows[r]) + j, lanes);
      }
      Multiply(queries, j, lanes, keys, sums);
    }
    for (size_t g = 0; g < kHeads; ++g) {
      const __m128 total = AddLanes(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
      _mm_mask_storeu_ps(scores + g * score_stride, tile.present,
                         ClampScores(_mm_mul_ps(total, _mm_set1_ps(scale))));
    }
  }
};

// Rows of 4-bit codes. Their numbers about the middle are bf16 numbers; a table holds them.
struct CodeRows {
  const uint8_t* codes;
  const uint16_t* steps;
  float scale;

  template <size_t kHeads>
  WAVEKV_INLINE_BF16 void ScoreTile(const PackedQueries& queries, size_t dim, size_t first,
                                    size_t count, float* scores, size_t score_stride) const {
    const size_t half = SketchRowBytes(dim);
    const RowTile tile(codes + first * half, half, count);
    const __m512i table = CodeTable();
    __m512 sums[kHeads][kRowsPerPass];
    SetZero(sums);
    for (size_t j = 0; j < half; j += kLanes) {
      const __mmask32 lanes = FirstLanes(half - j);
      __m512bh low[kRowsPerPass], high[kRowsPerPass];
      for (size_t r = 0; r < kRowsPerPass; ++r) {
        const __m512i both = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(lanes, tile.rows[r] + j));
        low[r] = (__m512bh)_mm512_permutexvar_epi16(both, table);
        high[r] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(both, kSketchBits), table);
      }
      Multiply(queries, j, lanes, low, sums);
      // The second half may be one dim shorter.
      Multiply(queries, half + j, FirstLanes(dim - half - j), high, sums);
    }
    // bf16 steps as floats.
    const __m128 step = _mm_castsi128_ps(
        _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_maskz_loadu_epi16(tile.present, steps + first)), 16));
    const __m128 factor = _mm_mul_ps(step, _mm_set1_ps(scale));
    for (size_t g = 0; g < kHeads; ++g) {
      float* const score = scores + g * score_stride;
      const __m128 total = AddLanes(sums[g][0], sums[g][1], sums[g][2], sums[g][3]);
      const __m128 base = _mm_maskz_loadu_ps(tile.present, score);
      _mm_mask_storeu_ps(score, tile.present,
                         ClampScores(_mm_add_ps(base, _mm_mul_ps(total, factor))));
    }
  }

  // bf16 of each code about the middle, for whatever stands above its four bits.
  WAVEKV_INLINE_BF16 static __m512i CodeTable() {
    alignas(64) float numbers[2 * (kSketchCodeMax + 1)];
    for (uint32_t i = 0; i <= kSketchCodeMax; ++i) {
      numbers[i] = numbers[i + kSketchCodeMax + 1] = static_cast<float>(i) - kSketchCodeMiddle;
    }
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(numbers + 16), _mm512_load_ps(numbers));
  }
};

template <size_t kHeads, class Rows>
WAVEKV_TARGET_BF16 void ScoreHeads(const PackedQueries& queries, size_t dim, const Rows& rows,
                                   size_t row_count, float* scores, size_t score_stride) {
  for (size_t r = 0; r < row_count; r += kRowsPerPass) {
    const size_t count = row_count - r < kRowsPerPass ? row_count - r : kRowsPerPass;
    rows.template ScoreTile<kHeads>(queries, dim, r, count, scores + r, score_stride);
  }
}

template <class Rows>
void ScorePacked(const PackedQueries& queries, size_t heads, size_t dim, const Rows& rows,
                 size_t row_count, float* scores, size_t score_stride) {
  switch (heads) {
    case 0:
      return;
    case 1:
      return ScoreHeads<1>(queries, dim, rows, row_count, scores, score_stride);
    case 2:
      return ScoreHeads<2>(queries, dim, rows, row_count, scores, score_stride);
    case 3:
      return ScoreHeads<3>(queries, dim, rows, row_count, scores, score_stride);
    default:
      return ScoreHeads<4>(queries, dim, rows, row_count, scores, score_stride);
  }
}

// Each head by itself, so that what others hold changes nothing of its scores: those that are bf16
// numbers a few at a time, each of the others by plain(head).
template <class Rows, class Plain>
void ScoreGroup(const float* queries, size_t group_size, size_t dim, const Rows& rows,
                size_t row_count, float* scores, size_t score_stride, const Plain& plain) {
  PackedQueries packed;
  size_t first = 0, count = 0;  // Heads that are packed and not yet done.
  for (size_t g = 0; g < group_size; ++g) {
    const bool exact = Pack(queries + g * dim, dim, packed.values[count]);
    if (exact) ++count;
    if (exact && count < kHeadsMax && g + 1 < group_size) continue;
    ScorePacked(packed, count, dim, rows, row_count, scores + first * score_stride, score_stride);
    if (!exact) plain(g);
    first = g + 1;
    count = 0;
  }
}

void DotRows(DType dtype, const float* queries, size_t group_size, size_t dim, const void* rows,
             size_t row_count, float scale, float* scores, size_t score_stride) {
  if (dtype != DType::kBF16 || dim > kDimMax) {
    return plain_dot_rows(dtype, queries, group_size, dim, rows, row_count, scale, scores,
                          score_stride);
  }
  const StoredRows stored = {static_cast<const uint16_t*>(rows), scale};
  ScoreGroup(queries, group_size, dim, stored, row_count, scores, score_stride, [&](size_t g) {
    plain_dot_rows(dtype, queries + g * dim, 1, dim, rows, row_count, scale,
                   scores + g * score_stride, score_stride);
  });
}

void AddCodeDots(const float* queries, size_t group_size, size_t dim, const uint8_t* codes,
                 const uint16_t* steps, size_t row_count, float scale, float* scores,
                 size_t score_stride) {
  if (dim > kDimMax) {
    return plain_add_code_dots(queries, group_size, dim, codes, steps, row_count, scale, scores,
                               score_stride);
  }
  const CodeRows sketched = {codes, steps, scale};
  ScoreGroup(queries, group_size, dim, sketched, row_count, scores, score_stride, [&](size_t g) {
    plain_add_code_dots(queries + g * dim, 1, dim, codes, steps, row_count, scale,
                        scores + g * score_stride, score_stride);
  });
}

}  // namespace

bool SetBf16Kernels(Kernels* kernels) {
  if (!__builtin_cpu_supports("avx512bf16")) return false;
  plain_dot_rows = kernels->dot_rows;
  plain_add_code_dots = kernels->add_code_dots;
  kernels->isa = "avx512_bf16";
  kernels->dot_rows = &DotRows;
  kernels->add_code_dots = &AddCodeDots;
  return true;
}

}  // namespace wavekv::simd

#else

namespace wavekv::simd {

bool SetBf16Kernels(Kernels*) { return false; }

}  // namespace wavekv::simd

#endif
