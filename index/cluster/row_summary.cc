#include "index/cluster/row_summary.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/cluster/distance.h"

namespace wavekv {
namespace {

constexpr float kFloatMax = std::numeric_limits<float>::max();
constexpr double kCodeMax = 127;
// Far above what double arithmetic over a cluster loses, far below what matters.
constexpr double kDoubleSlack = 0x1p-45;
constexpr double kFloatSlack = 0x1p-23;

// The smallest float not below `value` (and one more, for the double's own rounding); finite.
float RoundUp(double value) {
  if (value == 0) return 0;
  if (value >= kFloatMax) return kFloatMax;
  return std::min(kFloatMax, std::nextafter(static_cast<float>(value), kFloatMax));
}

double Norm(std::span<const float> row) {
  double sum = 0;
  for (const float x : row) sum += double{x} * x;
  return std::sqrt(sum);
}

}  // namespace

RowSummariser::RowSummariser(std::span<const float> rows, uint32_t dim)
    : rows_(rows), dim_(dim), dim_squares_(dim, 0), mean_(dim, 0), stored_(dim), differences_(dim) {
  for (size_t at = 0; at < rows.size(); at += dim) {
    for (uint32_t j = 0; j < dim; ++j) mean_[j] += rows[at + j];
  }
  const auto count = static_cast<double>(rows.size() / dim);
  for (const double sum : mean_) center_.push_back(static_cast<float>(sum / count));
}

RowSummary RowSummariser::Summarise(uint32_t first_row, uint32_t row_count, RowCodes* sketch) {
  const float* rows = rows_.data() + size_t{first_row} * dim_;
  std::fill(mean_.begin(), mean_.end(), 0);
  for (uint32_t r = 0; r < row_count; ++r) {
    for (uint32_t j = 0; j < dim_; ++j) mean_[j] += rows[size_t{r} * dim_ + j];
  }
  double largest = 0;
  for (uint32_t j = 0; j < dim_; ++j) {
    mean_[j] /= row_count;
    largest = std::max(largest, std::abs(mean_[j] - center_[j]));
  }
  RowSummary summary;
  summary.scale = static_cast<float>(largest / kCodeMax);
  summary.codes.resize(dim_);
  double delta_squared = 0, deviation_squared = 0;
  for (uint32_t j = 0; j < dim_; ++j) {
    if (summary.scale > 0) {
      const double steps = (mean_[j] - center_[j]) / summary.scale;
      summary.codes[j] =
          static_cast<int8_t>(std::clamp(std::nearbyint(steps), -kCodeMax, kCodeMax));
    }
    const double deviation = double{summary.scale} * summary.codes[j];
    stored_[j] = center_[j] + deviation;
    delta_squared += (mean_[j] - stored_[j]) * (mean_[j] - stored_[j]);
    deviation_squared += deviation * deviation;
  }
  double radius_squared = 0, sketch_error = 0;
  for (uint32_t r = 0; r < row_count; ++r) {
    const float* row = rows + size_t{r} * dim_;
    for (uint32_t j = 0; j < dim_; ++j) {
      const double difference = row[j] - stored_[j];
      dim_squares_[j] += difference * difference;
    }
    const double distance_squared = SquaredDistance(row, stored_.data(), dim_);
    radius_squared = std::max(radius_squared, distance_squared);
    summary.mean_square += distance_squared / row_count;
    if (sketch != nullptr) {
      for (uint32_t j = 0; j < dim_; ++j) differences_[j] = static_cast<float>(row[j] - stored_[j]);
      sketch_error = std::max(sketch_error, AppendCodes(differences_.data(), dim_, sketch));
    }
  }
  const double radius = std::sqrt(radius_squared), deviation_norm = std::sqrt(deviation_squared);
  summary.radius = RoundUp(radius);
  // The differences were rounded to float before they were sketched.
  if (sketch != nullptr) summary.sketch_error = RoundUp(sketch_error + kFloatSlack * radius);
  summary.deviation_norm = RoundUp(deviation_norm);
  summary.delta =
      RoundUp(std::sqrt(delta_squared) + kDoubleSlack * (Norm(center_) + deviation_norm + radius));
  return summary;
}

float RowSummariser::center_norm() const { return RoundUp(Norm(center_)); }

float RowSummariser::row_norm_max() const {
  double longest = 0;
  for (size_t at = 0; at < rows_.size(); at += dim_) {
    longest = std::max(longest, Norm(rows_.subspan(at, dim_)));
  }
  return longest == 0
             ? 0
             : std::nextafter(static_cast<float>(std::min<double>(longest, kFloatMax)), 0.0f);
}

}  // namespace wavekv
