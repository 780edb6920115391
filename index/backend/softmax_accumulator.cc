#include "index/backend/softmax_accumulator.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace wavekv {

SoftmaxAccumulator::SoftmaxAccumulator(const simd::Kernels& kernels, uint32_t group_size,
                                       uint32_t value_dim, DType value_dtype)
    : kernels_(kernels),
      group_size_(group_size),
      value_dim_(value_dim),
      value_dtype_(value_dtype),
      max_(group_size, -std::numeric_limits<float>::infinity()),
      denominator_(group_size, 0),
      numerator_(size_t{group_size} * value_dim, 0) {}

void SoftmaxAccumulator::AddTile(float* scores, uint32_t row_count,
                                 std::span<const ValueRun> runs) {
  if (row_count == 0) return;
  for (uint32_t g = 0; g < group_size_; ++g) {
    float* head_scores = scores + size_t{g} * kTileRows;
    const float tile_max = kernels_.max(head_scores, row_count);
    if (tile_max > max_[g]) {
      // exp(-inf) = 0 clears what is empty anyway.
      const float rescale = std::exp(max_[g] - tile_max);
      denominator_[g] *= rescale;
      kernels_.scale(&numerator_[size_t{g} * value_dim_], value_dim_, rescale);
      max_[g] = tile_max;
    }
    denominator_[g] += kernels_.exp_sum(head_scores, row_count, max_[g]);
  }
  uint32_t first = 0;
  for (const ValueRun& run : runs) {
    kernels_.accumulate_rows(value_dtype_, run.values, run.row_count, value_dim_, scores + first,
                             kTileRows, group_size_, numerator_.data(), value_dim_);
    first += run.row_count;
  }
}

void SoftmaxAccumulator::Finish(PartialAttention* result) const {
  result->out.assign(numerator_.size(), 0.0f);
  result->lse.assign(group_size_, -std::numeric_limits<float>::infinity());
  for (uint32_t g = 0; g < group_size_; ++g) {
    if (denominator_[g] == 0) continue;
    result->lse[g] = static_cast<float>(max_[g] + std::log(denominator_[g]));
    // One division: as many as there are outputs take longer than a short step's whole attention.
    float* const out = result->out.data() + size_t{g} * value_dim_;
    std::copy_n(numerator_.data() + size_t{g} * value_dim_, value_dim_, out);
    kernels_.scale(out, value_dim_, static_cast<float>(1 / denominator_[g]));
  }
}

}  // namespace wavekv
