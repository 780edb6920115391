// The hot loops of the index on raw pointers, once per instruction set.
//
// Every level computes the same thing to float rounding; within one level a result depends on the
// numbers alone: not on how rows are cut into calls, not on threads, not on alignment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"
#include "index/simd/query_codes.h"
#include "storage/base/dtype.h"

namespace wavekv::simd {

// Scores and weights are clamped to this, so that finite keys and queries of any size give finite
// attention; it leaves room to add and subtract two of them.
inline constexpr float kScoreMax = 1e38f;

// What turns weights into shares and ranks, for each head of a group.
struct RankFactors {
  std::span<const float> share;          // [group_size]
  std::span<const float> rank;           // [group_size]
  std::span<const float> reach_squares;  // [group_size]
};

// One level's loops. Rows are dense and row-major; pointers need the alignment of their element.
struct Kernels {
  const char* isa;     // "scalar", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "neon", ...
  size_t float_lanes;  // Floats in one vector.

  // scores[g * score_stride + r] = scale * (queries[g] . rows[r]), clamped to +-kScoreMax.
  // queries [group_size, dim] f32; rows [row_count, dim] dtype.
  void (*dot_rows)(DType dtype, const float* queries, size_t group_size, size_t dim,
                   const void* rows, size_t row_count, float scale, float* scores,
                   size_t score_stride);

  // sums[g * sum_stride + j] += sum over r of weights[g * weight_stride + r] * rows[r][j], r
  // ascending. rows [row_count, dim] dtype.
  void (*accumulate_rows)(DType dtype, const void* rows, size_t row_count, size_t dim,
                          const float* weights, size_t weight_stride, size_t group_size,
                          float* sums, size_t sum_stride);

  // scores[g * score_stride + r] += scale * (queries[g] . sketched difference of row r), then
  // clamped to +-kScoreMax. queries [group_size, dim] f32; codes [row_count, SketchRowBytes(dim)]
  // and steps [row_count] as in RowCodes (index/token_sketch.h).
  void (*add_code_dots)(const float* queries, size_t group_size, size_t dim, const uint8_t* codes,
                        const uint16_t* steps, size_t row_count, float scale, float* scores,
                        size_t score_stride);

  // scores[g * score_stride + r] = bases[g] + factors[g] * scales[r] * (query codes g . codes r),
  // clamped to +-kScoreMax; the products' sum is exact. `panels` holds the codes of row_count
  // clusters as SegmentHead::key_codes does, queries.padded_dim of each.
  void (*dot_panels)(const QueryCodes& queries, const uint8_t* panels, size_t row_count,
                     const float* scales, const float* bases, const float* factors, float* scores,
                     size_t score_stride);

  // For each r of `rows` in turn: sums[g * sum_stride + j] += weights[g * weight_stride + r] *
  // codes[r, j]. codes [any, dim].
  void (*accumulate_means)(const int8_t* codes, const uint32_t* rows, size_t row_count, size_t dim,
                           const float* weights, size_t weight_stride, size_t group_size,
                           float* sums, size_t sum_stride);

  // The same with 4-bit codes about their middle: codes [any, SketchRowBytes(dim)] as in RowCodes.
  void (*accumulate_codes)(const uint8_t* codes, const uint32_t* rows, size_t row_count, size_t dim,
                           const float* weights, size_t weight_stride, size_t group_size,
                           float* sums, size_t sum_stride);

  // Largest of x[0, n); -inf when n is 0.
  float (*max)(const float* x, size_t n);

  // x[i] = exp(x[i] - shift); returns their sum. x[i] - shift is at most 0.
  float (*exp_sum)(float* x, size_t n, float shift);

  // For each head g of a group: log_masses[g * stride + i] = scores[g * stride + i] + log_sizes[i]
  // + gain, clamped: the expected log of a sum of exp over a cluster of n tokens whose logits
  // scatter by s = sqrt(reach_squares[g] * key_spreads[i]) about the score. The gain is half of
  // what normal ones have: s^2 / 2; above s = sqrt(2 ln n), where a few cannot hold the tail, s
  // sqrt(2 ln n) - ln n; and at most s. tops[g] becomes the largest if it is less. key_spreads and
  // reach_squares are not negative, log_sizes the logs of whole numbers.
  void (*estimate_log_masses)(const float* scores, size_t stride, size_t group_size,
                              const float* key_spreads, const float* log_sizes,
                              const float* reach_squares, size_t n, float* log_masses, float* tops);

  // x[i] *= factor.
  void (*scale)(float* x, size_t n, float factor);

  // Sum of a[i] * b[i].
  float (*dot)(const float* a, const float* b, size_t n);

  // out[i] = mask[i] * (sum over g of factors[g] * x[g * stride + i]).
  void (*combine)(const float* x, size_t stride, size_t group_size, const float* factors,
                  const float* mask, size_t n, float* out);

  // sums[k] += sum of the x[i] that are below thresholds[k].
  void (*sums_below)(const float* x, size_t n, const float* thresholds, size_t threshold_count,
                     float* sums);

  // Lists, ascending, each i below n with x[g * stride + i] >= thresholds[g] for some g. `list` has
  // room for n; returns how many. group_size is at least 1.
  size_t (*list_reaching)(const float* x, size_t stride, size_t group_size, const float* thresholds,
                          size_t n, uint32_t* list);

  // For each head g, weights[g * stride + i] being in proportion to its estimated mass of cluster
  // i: mass_share[i] = sum over g of factors.share[g] * weight; rank[i] = value_spreads[i] * sum
  // over g of factors.rank[g] * weight * tail * sqrt(1 - exp(-v)), v = min(reach_squares[g] *
  // key_spreads[i], 64), exp(v) to third order (within 2 % of the whole). tail = exp(4 y), exp(y)
  // to third order, 4 y = 3 v / 8 - min(v / 2, sqrt(v)) / 2 (docs/decisions/006-ranking.md).
  void (*rank_clusters)(const RankFactors& factors, const float* weights, size_t stride,
                        const float* key_spreads, const float* value_spreads, size_t n,
                        float* mass_share, float* rank);

  // target[i] = source[i], exact. source [n] dtype.
  void (*to_float)(DType dtype, const void* source, size_t n, float* target);

  // For each point the slot with the largest dot product in the listed panels of centroids
  // (index/simd/assign.h), the lowest among equals, and that dot product: in registers, no matrix
  // of distances is written. points [point_count, dim] f32, finite; panels [.., dim,
  // kPanelCentroids]; panel_list [list_count >= 1] ascending. The sum over dim is taken in
  // ascending order with fused multiply-adds wherever the level has them: such levels agree bit for
  // bit.
  void (*nearest_in_panels)(const float* points, size_t point_count, size_t dim,
                            const float* panels, const uint16_t* panel_list, size_t list_count,
                            uint32_t* slots, float* dots);

  // maxima[p * panel_count + q] = the largest dot product of point p in panel q.
  void (*panel_maxima)(const float* points, size_t point_count, size_t dim, const float* panels,
                       size_t panel_count, float* maxima);
};

// Every level that this build has and this processor runs, best first; never empty.
std::span<const Kernels* const> AvailableKernels();

// The level named by `isa` ("" means the best). InvalidArgument lists what is available.
absl::StatusOr<const Kernels*> FindKernels(std::string_view isa);

// What the environment variable WAVEKV_ISA names, else the best. InvalidArgument as FindKernels.
absl::StatusOr<const Kernels*> ChooseKernels();

// The same, decided once; a name that is not available ends the process.
const Kernels& ActiveKernels();

}  // namespace wavekv::simd
