#include "index/backend/cpu_attend.h"

#include <algorithm>
#include <cstddef>

#include "absl/container/inlined_vector.h"
#include "index/backend/softmax_accumulator.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

constexpr size_t kLineBytes = 64;
// Of a longer run the processor finds out itself that it is read in order.
constexpr size_t kPrefetchBytesMax = 16 << 10;

void PrefetchRows(const std::byte* rows, size_t bytes) {
  for (size_t at = 0; at < std::min(bytes, kPrefetchBytesMax); at += kLineBytes) {
    __builtin_prefetch(rows + at);
  }
}

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
  for (size_t i = 0; i < rows.size(); ++i) {
    const RowRun& run = rows[i];
    // Runs lie anywhere: while this one is scored, its values and the next one's keys come.
    PrefetchRows(run.values, run.row_count * value_bytes);
    if (i + 1 < rows.size()) PrefetchRows(rows[i + 1].keys, rows[i + 1].row_count * key_bytes);
    for (uint32_t row = 0; row < run.row_count;) {
      const uint32_t count = std::min(run.row_count - row, kTileRows - tile_rows);
      kernels.dot_rows(query.payload_dtype, query.queries.data(), query.group_size, query.key_dim,
                       run.keys + row * key_bytes, count, query.scale, scores.data() + tile_rows,
                       kTileRows);
      tile.push_back({run.values + row * value_bytes, count});
      tile_rows += count;
      row += count;
      if (tile_rows == kTileRows) {
        accumulator.AddTile(scores.data(), tile_rows, tile);
        tile.clear();
        tile_rows = 0;
      }
    }
  }
  accumulator.AddTile(scores.data(), tile_rows, tile);
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
