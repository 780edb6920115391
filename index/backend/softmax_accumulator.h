// Attention computed in one pass over the rows: a running maximum, denominator and numerator for
// each query head, rescaled when the maximum grows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "index/backend/compute_backend.h"
#include "index/simd/kernels.h"
#include "storage/base/dtype.h"

namespace wavekv {

// Consecutive value rows of a tile.
struct ValueRun {
  const std::byte* values = nullptr;  // [row_count, value_dim]
  uint32_t row_count = 0;
};

// Computes in its result: a step's attention is a few hundred nanoseconds, of which memory of its
// own would be a good part.
class SoftmaxAccumulator {
 public:
  // Rows of one tile. What is added is cut into tiles by count alone, so that the result does not
  // depend on how rows lie in memory.
  static constexpr uint32_t kTileRows = 128;

  // `result` holds the attention over nothing until something is added, and what is not yet
  // normalised from then on until Finish. Must outlive the accumulator.
  SoftmaxAccumulator(const simd::Kernels& kernels, uint32_t group_size, uint32_t value_dim,
                     DType value_dtype, PartialAttention* result);

  // Adds the mass of 1 to kTileRows rows with these scores, [group_size, kTileRows], which become
  // their weights, [group_size, the returned stride]. AddValues of the same rows follows.
  size_t WeighTile(float* scores, uint32_t row_count);

  // Adds the values of some of the tile's rows, in order; weights from the first of these rows on.
  void AddValues(const ValueRun& run, const float* weights, size_t weight_stride);

  // Leaves the normalised output and log mass of what was added in the result. Once.
  void Finish();

 private:
  // The head's maximum, where `score` may be a new one; what was added so far is rescaled for it.
  float RaiseMax(uint32_t head, float score);

  const simd::Kernels& kernels_;
  const uint32_t group_size_;
  const uint32_t value_dim_;
  const DType value_dtype_;
  PartialAttention* const result_;  // out: the numerators in units of exp(max); lse: the max.
  absl::InlinedVector<double, 16> denominator_;  // [group_size] likewise
};

}  // namespace wavekv
