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
#include "storage/base/dtype.h"

namespace wavekv::simd {

// Scores and weights are clamped to this, so that finite keys and queries of any size give finite
// attention; it leaves room to add and subtract two of them.
inline constexpr float kScoreMax = 1e38f;

// One level's loops. Rows are dense and row-major; pointers need the alignment of their element.
struct Kernels {
  const char* isa;     // "scalar", "avx2", "avx512", "neon", ...
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

  // sums[g * sum_stride + j] += weights[g * weight_stride] * sketched difference j of one row.
  // codes [SketchRowBytes(dim)] and its step.
  void (*accumulate_codes)(const uint8_t* codes, uint16_t step, size_t dim, const float* weights,
                           size_t weight_stride, size_t group_size, float* sums, size_t sum_stride);

  // Largest of x[0, n); -inf when n is 0.
  float (*max)(const float* x, size_t n);

  // x[i] = exp(x[i] - shift); returns their sum. x[i] - shift is at most 0.
  float (*exp_sum)(float* x, size_t n, float shift);

  // out[i] = a[i] + b[i]. `out` may be `a` or `b`.
  void (*add)(const float* a, const float* b, size_t n, float* out);

  // x[i] *= factor.
  void (*scale)(float* x, size_t n, float factor);

  // y[i] += factor * x[i].
  void (*multiply_add)(float factor, const float* x, size_t n, float* y);

  // rank[i] += weight * share[i] * value_spreads[i] * sqrt(exp(v) - 1) with v = min(reach_squared *
  // key_spreads[i], 4), exp to third order (1 % at v = 1, 36 % too small at 4, where it saturates).
  void (*add_misjudged)(float weight, float reach_squared, const float* share,
                        const float* key_spreads, const float* value_spreads, size_t n,
                        float* rank);

  // target[i] = source[i], exact. source [n] dtype.
  void (*to_float)(DType dtype, const void* source, size_t n, float* target);

  // out[r] = |rows[r] - center|^2. rows [row_count, dim] f32, center [dim].
  void (*squared_distances)(const float* rows, size_t row_count, size_t dim, const float* center,
                            float* out);

  // For each point the centroid with the largest dot product, the lowest index among equals.
  // points [point_count, dim], centroids [centroid_count, dim], both f32; centroid_count >= 1.
  // `scratch` [NearestScratchFloats(centroid_count, dim)]. The sum over dim is taken in ascending
  // order with fused multiply-adds wherever the level has them: such levels agree bit for bit.
  void (*nearest_by_dot)(const float* points, size_t point_count, const float* centroids,
                         size_t centroid_count, size_t dim, float* scratch, int64_t* labels,
                         float* dots);
};

// Floats of scratch that nearest_by_dot needs at any level.
constexpr size_t NearestScratchFloats(size_t centroid_count, size_t dim) {
  return (centroid_count + 128) * dim;
}

// Every level that this build has and this processor runs, best first; never empty.
std::span<const Kernels* const> AvailableKernels();

// The level named by `isa` ("" means the best). InvalidArgument lists what is available.
absl::StatusOr<const Kernels*> FindKernels(std::string_view isa);

// What the environment variable WAVEKV_ISA names, else the best. Decided once; a name that is not
// available ends the process with the list of those that are.
const Kernels& ActiveKernels();

}  // namespace wavekv::simd
