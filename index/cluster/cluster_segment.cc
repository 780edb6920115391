#include "index/cluster/cluster_segment.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "index/cluster/partition.h"
#include "storage/base/check.h"
#include "storage/base/dtype.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Far above what double arithmetic over a cluster loses, far below what matters.
constexpr double kDoubleSlack = 0x1p-45;

constexpr double kFloatSlack = 0x1p-23;

// The smallest float not below `value` (and one more, for the double's own rounding); finite.
float RoundUp(double value) {
  if (value == 0) return 0;
  constexpr float kMax = std::numeric_limits<float>::max();
  if (value >= kMax) return kMax;
  return std::min(kMax, std::nextafter(static_cast<float>(value), kMax));
}

uint16_t RoundToIndex(DType dtype, double value) {
  const double limit = dtype == DType::kF16 ? 65504.0 : 0x1.fep127;  // Largest finite ones.
  const auto clamped = static_cast<float>(std::clamp(value, -limit, limit));
  return dtype == DType::kF16 ? FloatToF16(clamped) : FloatToBF16(clamped);
}

float IndexToFloat(DType dtype, uint16_t bits) {
  return dtype == DType::kF16 ? F16ToFloat(bits) : BF16ToFloat(bits);
}

// What one cluster's rows have in common.
struct RowSummary {
  std::vector<uint16_t> stored_mean;  // [dim]
  float radius = 0;                   // Largest distance of a row from the stored mean.
  float delta = 0;                    // Distance of the exact mean from the stored one.
  float norm = 0;                     // Length of the stored mean.
  double mean_square = 0;             // Mean squared distance of a row from the stored mean.
  float sketch_error = 0;             // Largest distance of a row from its sketch, if it has one.
};

// `rows` [row_count, dim]. Adds each dim's squared differences to dim_squares [dim], and the rows'
// codes to `codes` unless that is null.
RowSummary Summarise(const float* rows, uint32_t row_count, uint32_t dim, DType index_dtype,
                     std::vector<double>* dim_squares, RowCodes* codes) {
  std::vector<double> mean(dim, 0);
  for (uint32_t r = 0; r < row_count; ++r) {
    for (uint32_t j = 0; j < dim; ++j) mean[j] += rows[size_t{r} * dim + j];
  }
  RowSummary summary;
  summary.stored_mean.resize(dim);
  std::vector<double> stored(dim);
  double delta_squared = 0, norm_squared = 0;
  for (uint32_t j = 0; j < dim; ++j) {
    mean[j] /= row_count;
    summary.stored_mean[j] = RoundToIndex(index_dtype, mean[j]);
    stored[j] = IndexToFloat(index_dtype, summary.stored_mean[j]);
    delta_squared += (mean[j] - stored[j]) * (mean[j] - stored[j]);
    norm_squared += stored[j] * stored[j];
  }
  double radius_squared = 0, sketch_error = 0;
  std::vector<float> differences(dim);
  for (uint32_t r = 0; r < row_count; ++r) {
    double distance_squared = 0;
    for (uint32_t j = 0; j < dim; ++j) {
      const double difference = rows[size_t{r} * dim + j] - stored[j];
      differences[j] = static_cast<float>(difference);
      distance_squared += difference * difference;
      (*dim_squares)[j] += difference * difference;
    }
    radius_squared = std::max(radius_squared, distance_squared);
    summary.mean_square += distance_squared / row_count;
    if (codes != nullptr) {
      sketch_error = std::max(sketch_error, AppendCodes(differences.data(), dim, codes));
    }
  }
  const double norm = std::sqrt(norm_squared), radius = std::sqrt(radius_squared);
  summary.radius = RoundUp(radius);
  summary.delta = RoundUp(std::sqrt(delta_squared) + kDoubleSlack * (norm + radius));
  summary.norm = RoundUp(norm);
  // The differences were rounded to float before they were sketched.
  if (codes != nullptr) summary.sketch_error = RoundUp(sketch_error + kFloatSlack * radius);
  return summary;
}

// A spread as float: large ones are clamped, so that products of them with finite numbers stay
// finite; they are far beyond where the ranking saturates.
float ClampSpread(double spread) { return static_cast<float>(std::min(spread, 1e30)); }

// Each dim's share of the whole; all zero when there is no spread.
std::vector<float> SharesOf(const std::vector<double>& dim_squares) {
  double total = 0;
  for (const double squares : dim_squares) total += squares;
  std::vector<float> shares(dim_squares.size(), 0.0f);
  if (total == 0) return shares;
  for (size_t j = 0; j < shares.size(); ++j) {
    shares[j] = static_cast<float>(dim_squares[j] / total);
  }
  return shares;
}

// Copies the rows named by `order` one after the other.
void GatherRows(const std::byte* rows, std::span<const uint16_t> order, size_t row_bytes,
                std::byte* out) {
  for (size_t r = 0; r < order.size(); ++r) {
    std::memcpy(out + r * row_bytes, rows + order[r] * row_bytes, row_bytes);
  }
}

SegmentHead LayOutRows(const ClusterInput& input, const std::vector<ClusterMembers>& clusters) {
  SegmentHead head;
  head.first_position = input.first_position;
  head.token_count = input.token_count;
  head.cluster_count = static_cast<uint32_t>(clusters.size());
  head.key_dim = input.key_dim;
  head.value_dim = input.value_dim;
  head.payload_dtype = input.dtype;
  head.index_dtype = IndexDType(input.dtype);
  head.first_row.push_back(0);
  head.first_block.push_back(0);
  head.row_to_offset.reserve(input.token_count);
  for (const ClusterMembers& members : clusters) {
    const auto size = static_cast<uint32_t>(members.size());
    WAVEKV_CHECK(size >= 1 && size <= kClusterTokensMax, "cluster size");
    for (const uint32_t m : members) head.row_to_offset.push_back(static_cast<uint16_t>(m));
    head.sizes.push_back(static_cast<uint16_t>(size));
    head.first_row.push_back(head.first_row.back() + size);
    head.first_block.push_back(head.first_block.back() + (size + kBlockTokens - 1) / kBlockTokens);
  }
  WAVEKV_CHECK(head.first_row.back() == input.token_count, "cluster sizes sum to the segment");
  return head;
}

}  // namespace

absl::StatusOr<SegmentHead> ClusterSegmentOnCpu(const simd::Kernels& kernels,
                                                const ClusterInput& input,
                                                const ClusterOptions& options, std::byte* keys_out,
                                                std::byte* values_out) {
  WAVEKV_CHECK(input.token_count >= 1 && input.token_count <= 65536,
               "a segment has 1 to 65536 tokens: row_to_offset has 16 bits");
  std::vector<float> keys(size_t{input.token_count} * input.key_dim);
  kernels.to_float(input.dtype, input.keys, keys.size(), keys.data());
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<ClusterMembers> clusters,
                          PartitionKeys(kernels, keys, input.token_count, input.key_dim, options));
  return SummariseClusters(kernels, input, clusters, options.sketch, keys_out, values_out);
}

SegmentHead SummariseClusters(const simd::Kernels& kernels, const ClusterInput& input,
                              const std::vector<ClusterMembers>& clusters, bool sketch,
                              std::byte* keys_out, std::byte* values_out) {
  SegmentHead head = LayOutRows(input, clusters);
  const size_t element = DTypeBytes(input.dtype);
  GatherRows(input.keys, head.row_to_offset, input.key_dim * element, keys_out);
  GatherRows(input.values, head.row_to_offset, input.value_dim * element, values_out);
  head.keys = keys_out;
  head.values = values_out;

  std::vector<float> keys(size_t{input.token_count} * input.key_dim);
  std::vector<float> values(size_t{input.token_count} * input.value_dim);
  kernels.to_float(input.dtype, keys_out, keys.size(), keys.data());
  kernels.to_float(input.dtype, values_out, values.size(), values.data());
  std::vector<double> key_squares(input.key_dim, 0), value_squares(input.value_dim, 0);
  for (uint32_t c = 0; c < head.cluster_count; ++c) {
    const size_t row = head.first_row[c];
    const RowSummary key =
        Summarise(&keys[row * input.key_dim], head.sizes[c], input.key_dim, head.index_dtype,
                  &key_squares, sketch ? &head.sketch.keys : nullptr);
    const RowSummary value =
        Summarise(&values[row * input.value_dim], head.sizes[c], input.value_dim, head.index_dtype,
                  &value_squares, sketch ? &head.sketch.values : nullptr);
    if (sketch) head.sketch.key_errors.push_back(key.sketch_error);
    head.centroids.insert(head.centroids.end(), key.stored_mean.begin(), key.stored_mean.end());
    head.value_means.insert(head.value_means.end(), value.stored_mean.begin(),
                            value.stored_mean.end());
    head.radii.push_back(key.radius);
    head.deltas.push_back(key.delta);
    head.value_radii.push_back(value.radius);
    head.key_spreads.push_back(ClampSpread(key.mean_square));
    head.value_spreads.push_back(ClampSpread(std::sqrt(value.mean_square / head.sizes[c])));
    head.centroid_norm_max = std::max(head.centroid_norm_max, key.norm);
    head.value_norm_max = std::max(head.value_norm_max, value.norm);
  }
  head.spread_shares = SharesOf(key_squares);
  return head;
}

}  // namespace wavekv
