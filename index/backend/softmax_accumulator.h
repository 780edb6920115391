// Attention computed in one pass over the rows: a running maximum, denominator and numerator for
// each query head, rescaled when the maximum grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/backend/compute_backend.h"
#include "index/simd/kernels.h"
#include "storage/base/dtype.h"

namespace wavekv {

// Consecutive value rows of a tile.
struct ValueRun {
  const std::byte* values = nullptr;  // [row_count, value_dim]
  uint32_t row_count = 0;
};

class SoftmaxAccumulator {
 public:
  // Rows of one tile. What is added is cut into tiles by count alone, so that the result does not
  // depend on how rows lie in memory.
  static constexpr uint32_t kTileRows = 128;

  SoftmaxAccumulator(const simd::Kernels& kernels, uint32_t group_size, uint32_t value_dim,
                     DType value_dtype);

  // Adds `row_count` <= kTileRows rows with these scores; overwrites the scores.
  // scores [group_size, kTileRows]; runs hold row_count rows together.
  void AddTile(float* scores, uint32_t row_count, std::span<const ValueRun> runs);

  // The normalised output and log mass of what was added.
  void Finish(PartialAttention* result) const;

 private:
  const simd::Kernels& kernels_;
  const uint32_t group_size_;
  const uint32_t value_dim_;
  const DType value_dtype_;
  std::vector<float> max_;           // [group_size]
  std::vector<double> denominator_;  // [group_size] in units of exp(max)
  std::vector<float> numerator_;     // [group_size, value_dim] likewise
};

}  // namespace wavekv
