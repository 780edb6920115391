// A clustered segment of one KV head: the index arrays and where its payload lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "index/token_sketch.h"
#include "storage/base/dtype.h"

namespace wavekv {

inline constexpr uint32_t kBlockTokens = 8;                      // Unit of the block cache.
inline constexpr uint32_t kClusterTokensMax = 4 * kBlockTokens;  // Larger ones are split.

// Key codes lie in panels of this many clusters; within a panel, in groups of this many dims.
inline constexpr uint32_t kPanelClusters = 16;
inline constexpr uint32_t kPanelDims = 4;
inline constexpr uint8_t kKeyCodeZero = 128;  // What stands for a deviation of 0.

// Dims of a panel: key_dim rounded up to whole groups.
constexpr uint32_t PanelDims(uint32_t key_dim) {
  return (key_dim + kPanelDims - 1) / kPanelDims * kPanelDims;
}

// Key codes of `cluster_count` clusters, whole panels.
constexpr size_t KeyCodeCount(uint32_t cluster_count, uint32_t key_dim) {
  return size_t{cluster_count + kPanelClusters - 1} / kPanelClusters * kPanelClusters *
         PanelDims(key_dim);
}

// Where the code of (cluster, dim) lies.
constexpr size_t KeyCodeIndex(uint32_t cluster, uint32_t dim, uint32_t key_dim) {
  const size_t panel = size_t{cluster / kPanelClusters} * kPanelClusters * PanelDims(key_dim);
  return panel + (dim / kPanelDims * kPanelClusters + cluster % kPanelClusters) * kPanelDims +
         dim % kPanelDims;
}

// Immutable once published. Rows are the segment's tokens sorted by cluster; a cluster is rows
// [first_row[c], first_row[c + 1]); its block j starts at row first_row[c] + 8 j.
struct SegmentHead {
  uint64_t uid = 0;             // Unique in the daemon's life: identity for the block cache.
  uint64_t first_position = 0;  // Token position of the segment's first token.
  uint32_t token_count = 0;
  uint32_t cluster_count = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  DType payload_dtype = DType::kBF16;
  bool given_labels = false;  // Clustered by ClusterInput::labels.

  // In the block pool; kept alive by payload_owner.
  const std::byte* keys = nullptr;    // [token_count, key_dim] payload_dtype
  const std::byte* values = nullptr;  // [token_count, value_dim] payload_dtype
  std::shared_ptr<const void> payload_owner;

  // Index arrays have 8 bits (docs/decisions/009-index-arrays.md). A stored centroid is
  // key_mean[j] + key_scales[c] * (key code - kKeyCodeZero), a stored value mean value_mean[j] +
  // value_scales[c] * value code. What follows them is about the rows as stored.
  std::vector<float> key_mean;      // [key_dim] the segment's mean key
  std::vector<uint8_t> key_codes;   // KeyCodeCount codes at KeyCodeIndex; kKeyCodeZero elsewhere
  std::vector<float> key_scales;    // [cluster_count]
  std::vector<float> value_mean;    // [value_dim] the segment's mean value
  std::vector<int8_t> value_codes;  // [cluster_count, value_dim]
  std::vector<float> value_scales;  // [cluster_count]
  std::vector<uint16_t> sizes;      // [cluster_count]
  std::vector<float> log_sizes;     // [cluster_count] LogSize(sizes[c])
  std::vector<float> radii;         // [cluster_count] max |key - stored centroid|, rounded up
  std::vector<float> deltas;        // [cluster_count] |mean key - stored centroid|, rounded up
  std::vector<float> value_radii;   // [cluster_count] max |value - stored mean|, rounded up
  // How much a step may expect to misjudge a cluster that it estimates (see RankClusters):
  std::vector<float> key_spreads;       // [cluster_count] mean of |key - stored centroid|^2
  std::vector<float> value_spreads;     // [cluster_count] rms of |value - stored mean| / sqrt(size)
  std::vector<float> spread_shares;     // [key_dim] each dim's share of the segment's key spread
  TokenSketch sketch;                   // Empty when ClusterOptions.sketch was false.
  float key_mean_norm = 0;              // |key_mean|, rounded up.
  float deviation_norm_max = 0;         // Largest |stored centroid - key_mean|, rounded up.
  float value_norm_max = 0;             // Length of the longest value, rounded down.
  float value_delta_max = 0;            // Largest |mean value - stored value mean|, rounded up.
  std::vector<uint32_t> first_row;      // [cluster_count + 1]
  std::vector<uint32_t> first_block;    // [cluster_count + 1]
  std::vector<uint16_t> row_to_offset;  // [token_count] position of a row minus first_position

  uint64_t end_position() const { return first_position + token_count; }
  uint64_t index_bytes() const;
  // Bytes a step reads to rank every cluster: centroids, sizes, spreads.
  uint64_t rank_read_bytes() const;
};

// The clustered part of one (sequence, layer, KV head): segments in order of position.
using HeadIndex = std::span<const SegmentHead* const>;

// A cluster's centroid and value mean as stored, exactly.
std::vector<double> StoredCentroid(const SegmentHead& segment, uint32_t cluster);
std::vector<double> StoredValueMean(const SegmentHead& segment, uint32_t cluster);

// A run of consecutive rows somewhere in host memory.
struct RowRun {
  const std::byte* keys = nullptr;    // [row_count, key_dim] payload dtype
  const std::byte* values = nullptr;  // [row_count, value_dim] payload dtype
  uint32_t row_count = 0;
};

}  // namespace wavekv
