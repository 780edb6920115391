#include "index/backend/cpu_attend.h"

#include <algorithm>
#include <cstddef>

#include "absl/container/inlined_vector.h"
#include "index/backend/fetch_ahead.h"
#include "index/backend/softmax_accumulator.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// Rows that are worked on between two requests.
constexpr uint32_t kPieceRows = 16;

}  // namespace

void AttendOnCpu(const simd::Kernels& kernels, std::span<const RowRun> rows,
                 const GroupQuery& query, PartialAttention* result) {
  constexpr uint32_t kTileRows = SoftmaxAccumulator::kTileRows;
  SoftmaxAccumulator accumulator(kernels, query.group_size, query.value_dim, query.payload_dtype,
                                 result);
  // Of the largest group so far. A tile's scores are written before they are read.
  thread_local std::vector<float> scores;
  scores.resize(std::max(scores.size(), size_t{query.group_size} * kTileRows));
  absl::InlinedVector<ValueRun, 16> tile;
  uint32_t tile_rows = 0;
  const size_t key_bytes = query.key_dim * DTypeBytes(query.payload_dtype);
  const size_t value_bytes = query.value_dim * DTypeBytes(query.payload_dtype);
  const auto keys_of = [=](const RowRun& run) {
    return std::span(run.keys, run.row_count * key_bytes);
  };
  const auto values_of = [=](const RowRun& run) {
    return std::span(run.values, run.row_count * value_bytes);
  };
  // Rows are requested a tile ahead of their use, their pages two.
  FetchBytesAhead key_pages(rows, 2 * kTileRows * key_bytes, keys_of, FetchPages);
  FetchBytesAhead value_pages(rows, 2 * kTileRows * value_bytes, values_of, FetchPages);
  FetchBytesAhead keys_ahead(rows, kTileRows * key_bytes, keys_of, FetchBytes);
  FetchBytesAhead values_ahead(rows, kTileRows * value_bytes, values_of, FetchBytes);
  // Memory is kept at work while values are added as well.
  const auto add_tile = [&] {
    key_pages.Next(kTileRows * key_bytes);
    value_pages.Next(kTileRows * value_bytes);
    const size_t stride = accumulator.WeighTile(scores.data(), tile_rows);
    uint32_t first = 0;
    for (const ValueRun& run : tile) {
      values_ahead.Next(run.row_count * value_bytes);
      accumulator.AddValues(run, scores.data() + first, stride);
      first += run.row_count;
    }
    tile.clear();
    tile_rows = 0;
  };
  for (const RowRun& run : rows) {
    for (uint32_t row = 0; row < run.row_count;) {
      const uint32_t count = std::min({run.row_count - row, kTileRows - tile_rows, kPieceRows});
      keys_ahead.Next(count * key_bytes);
      kernels.dot_rows(query.payload_dtype, query.queries.data(), query.group_size, query.key_dim,
                       run.keys + row * key_bytes, count, query.scale, scores.data() + tile_rows,
                       kTileRows);
      tile.push_back({run.values + row * value_bytes, count});
      tile_rows += count;
      row += count;
      if (tile_rows == kTileRows) add_tile();
    }
  }
  if (tile_rows > 0) add_tile();
  accumulator.Finish();
}

std::vector<RowRun> RowsOfClusters(HeadIndex index, std::span<const uint32_t> clusters) {
  std::vector<RowRun> runs;
  runs.reserve(clusters.size());
  size_t segment_idx = 0;
  uint32_t first = 0, previous = UINT32_MAX;  // First cluster of the segment; the one before.
  for (const uint32_t cluster : clusters) {
    if (cluster < first) segment_idx = first = 0;
    while (segment_idx < index.size() && cluster - first >= index[segment_idx]->cluster_count) {
      first += index[segment_idx++]->cluster_count;
    }
    WAVEKV_CHECK(segment_idx < index.size(), "a flat cluster index below ClusterCount");
    const SegmentHead& segment = *index[segment_idx];
    const uint32_t c = cluster - first;
    if (c > 0 && previous == cluster - 1) {
      runs.back().row_count += segment.sizes[c];
    } else {
      runs.push_back(RowsOf(segment, segment.first_row[c], segment.sizes[c]));
    }
    previous = cluster;
  }
  return runs;
}

}  // namespace wavekv
