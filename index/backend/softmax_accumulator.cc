#include "index/backend/softmax_accumulator.h"

#include <cmath>
#include <limits>

namespace wavekv {

SoftmaxAccumulator::SoftmaxAccumulator(const simd::Kernels& kernels, uint32_t group_size,
                                       uint32_t value_dim, DType value_dtype,
                                       PartialAttention* result)
    : kernels_(kernels),
      group_size_(group_size),
      value_dim_(value_dim),
      value_dtype_(value_dtype),
      result_(result),
      denominator_(group_size, 0) {
  result_->out.assign(size_t{group_size} * value_dim, 0.0f);
  result_->lse.assign(group_size, -std::numeric_limits<float>::infinity());
}

float SoftmaxAccumulator::RaiseMax(uint32_t head, float score) {
  float& max = result_->lse[head];
  if (score <= max) return max;
  if (denominator_[head] != 0) {
    const float rescale = std::exp(max - score);
    denominator_[head] *= rescale;
    kernels_.scale(&result_->out[size_t{head} * value_dim_], value_dim_, rescale);
  }
  return max = score;
}

size_t SoftmaxAccumulator::WeighTile(float* scores, uint32_t row_count) {
  // A call for less than a vector takes as long as one for a vector: few rows are moved together,
  // head beside head, and weighed in one.
  const bool few = row_count < kernels_.float_lanes;
  const size_t stride = few ? row_count : kTileRows;
  for (uint32_t g = 0; g < group_size_; ++g) {
    float* const head_scores = scores + size_t{g} * kTileRows;
    const float max = RaiseMax(g, kernels_.max(head_scores, row_count));
    if (few) {
      for (uint32_t r = 0; r < row_count; ++r) scores[g * stride + r] = head_scores[r] - max;
    } else {
      denominator_[g] += kernels_.exp_sum(head_scores, row_count, max);
    }
  }
  if (few) {
    kernels_.exp_sum(scores, group_size_ * stride, 0);
    for (uint32_t g = 0; g < group_size_; ++g) {
      float sum = 0;
      for (uint32_t r = 0; r < row_count; ++r) sum += scores[g * stride + r];
      denominator_[g] += sum;
    }
  }
  return stride;
}

void SoftmaxAccumulator::AddValues(const ValueRun& run, const float* weights,
                                   size_t weight_stride) {
  kernels_.accumulate_rows(value_dtype_, run.values, run.row_count, value_dim_, weights,
                           weight_stride, group_size_, result_->out.data(), value_dim_);
}

void SoftmaxAccumulator::Finish() {
  for (uint32_t g = 0; g < group_size_; ++g) {
    if (denominator_[g] == 0) continue;
    float& lse = result_->lse[g];
    lse = static_cast<float>(lse + std::log(denominator_[g]));
    // One division: as many as there are outputs take longer than a short step's whole attention.
    kernels_.scale(&result_->out[size_t{g} * value_dim_], value_dim_,
                   static_cast<float>(1 / denominator_[g]));
  }
}

}  // namespace wavekv
