#include "index/cluster/cluster_segment.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "index/cluster/partition.h"
#include "index/cluster/row_summary.h"
#include "index/zone/cluster_mass.h"
#include "storage/base/check.h"
#include "storage/base/dtype.h"

namespace wavekv {
namespace {

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

// The index arrays of the keys, and their sketch if it is wanted; `keys` [token_count, key_dim] in
// the order of clusters.
void FillKeySummaries(std::span<const float> keys, bool sketch, SegmentHead* head) {
  const uint32_t dim = head->key_dim;
  RowSummariser summariser(keys, dim);
  head->key_mean = summariser.center();
  head->key_mean_norm = summariser.center_norm();
  head->key_codes.assign(KeyCodeCount(head->cluster_count, dim), kKeyCodeZero);
  for (uint32_t c = 0; c < head->cluster_count; ++c) {
    const RowSummary key = summariser.Summarise(head->first_row[c], head->sizes[c],
                                                sketch ? &head->sketch.keys : nullptr);
    if (sketch) head->sketch.key_errors.push_back(key.sketch_error);
    for (uint32_t j = 0; j < dim; ++j) {
      head->key_codes[KeyCodeIndex(c, j, dim)] = static_cast<uint8_t>(key.codes[j] + kKeyCodeZero);
    }
    head->key_scales.push_back(key.scale);
    head->radii.push_back(key.radius);
    head->deltas.push_back(key.delta);
    head->key_spreads.push_back(ClampSpread(key.mean_square));
    head->deviation_norm_max = std::max(head->deviation_norm_max, key.deviation_norm);
  }
  head->spread_shares = SharesOf(summariser.dim_squares());
}

// Likewise of the values.
void FillValueSummaries(std::span<const float> values, bool sketch, SegmentHead* head) {
  RowSummariser summariser(values, head->value_dim);
  head->value_mean = summariser.center();
  head->value_norm_max = summariser.row_norm_max();
  for (uint32_t c = 0; c < head->cluster_count; ++c) {
    const RowSummary value = summariser.Summarise(head->first_row[c], head->sizes[c],
                                                  sketch ? &head->sketch.values : nullptr);
    head->value_codes.insert(head->value_codes.end(), value.codes.begin(), value.codes.end());
    head->value_scales.push_back(value.scale);
    head->value_radii.push_back(value.radius);
    head->value_spreads.push_back(ClampSpread(std::sqrt(value.mean_square / head->sizes[c])));
    head->value_delta_max = std::max(head->value_delta_max, value.delta);
  }
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
  head.given_labels = !input.labels.empty();
  head.first_row.push_back(0);
  head.first_block.push_back(0);
  head.row_to_offset.reserve(input.token_count);
  for (const ClusterMembers& members : clusters) {
    const auto size = static_cast<uint32_t>(members.size());
    WAVEKV_CHECK(size >= 1 && size <= kClusterTokensMax, "cluster size");
    for (const uint32_t m : members) head.row_to_offset.push_back(static_cast<uint16_t>(m));
    head.sizes.push_back(static_cast<uint16_t>(size));
    head.log_sizes.push_back(LogSize(head.sizes.back()));
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
  const std::vector<ClusterMembers> clusters =
      PartitionKeys(kernels, keys, input.token_count, input.key_dim, options, input.labels);
  if (options.pause) options.pause();
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
  FillKeySummaries(keys, sketch, &head);
  FillValueSummaries(values, sketch, &head);
  return head;
}

}  // namespace wavekv
