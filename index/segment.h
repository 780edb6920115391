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

// Index element type: 16 bit. The payload's own type where that has 16 bits, else bf16, which has
// the range of f32.
constexpr DType IndexDType(DType payload) {
  return payload == DType::kF16 ? DType::kF16 : DType::kBF16;
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
  DType index_dtype = DType::kBF16;

  // In the block pool; kept alive by payload_owner.
  const std::byte* keys = nullptr;    // [token_count, key_dim] payload_dtype
  const std::byte* values = nullptr;  // [token_count, value_dim] payload_dtype
  std::shared_ptr<const void> payload_owner;

  std::vector<uint16_t> centroids;    // [cluster_count, key_dim] index_dtype: the mean key
  std::vector<uint16_t> value_means;  // [cluster_count, value_dim] index_dtype: value sum / size
  std::vector<uint16_t> sizes;        // [cluster_count]
  std::vector<float> radii;           // [cluster_count] max |key - stored centroid|, rounded up
  std::vector<float> deltas;          // [cluster_count] |mean key - stored centroid|, rounded up
  std::vector<float> value_radii;     // [cluster_count] max |value - stored value mean|, rounded up
  // How much a step may expect to misjudge a cluster that it estimates (see RankClusters):
  std::vector<float> key_spreads;     // [cluster_count] mean of |key - stored centroid|^2
  std::vector<float> value_spreads;   // [cluster_count] rms of |value - stored mean| / sqrt(size)
  std::vector<float> spread_shares;   // [key_dim] each dim's share of the segment's key spread
  TokenSketch sketch;                 // Empty when ClusterOptions.sketch was false.
  float centroid_norm_max = 0;        // Largest |stored centroid|: scales the rounding of a score.
  float value_norm_max = 0;           // Largest |stored value mean|.
  std::vector<uint32_t> first_row;    // [cluster_count + 1]
  std::vector<uint32_t> first_block;  // [cluster_count + 1]
  std::vector<uint16_t> row_to_offset;  // [token_count] position of a row minus first_position

  uint64_t end_position() const { return first_position + token_count; }
  uint64_t index_bytes() const;
  // Bytes a step reads to rank every cluster and to estimate it from its summary: centroids, value
  // means, sizes, spreads.
  uint64_t index_read_bytes() const;
};

// The clustered part of one (sequence, layer, KV head): segments in order of position.
using HeadIndex = std::span<const SegmentHead* const>;

// A run of consecutive rows somewhere in host memory.
struct RowRun {
  const std::byte* keys = nullptr;    // [row_count, key_dim] payload dtype
  const std::byte* values = nullptr;  // [row_count, value_dim] payload dtype
  uint32_t row_count = 0;
};

}  // namespace wavekv
