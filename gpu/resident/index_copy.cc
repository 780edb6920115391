#include "gpu/resident/index_copy.h"

#include <cstddef>

#include "storage/base/check.h"

namespace wavekv::resident {
namespace {

// `values`, then zeroes.
template <class T>
std::vector<T> Padded(const std::vector<T>& values, size_t count) {
  std::vector<T> padded(values);
  padded.resize(count);
  return padded;
}

template <class T>
void AppendArray(const std::vector<T>& array, uint64_t array_offset, uint64_t first,
                 std::vector<ByteCopy>* copies) {
  if (array.empty()) return;
  copies->push_back({reinterpret_cast<const std::byte*>(array.data()),
                     array_offset + first * sizeof(T), array.size() * sizeof(T)});
}

}  // namespace

IndexCopy::IndexCopy(const ResidentSegment& segment, const SegmentNumbers& its_numbers)
    : numbers(its_numbers) {
  const SegmentHead& head = *segment.head;
  const uint32_t dim = head.key_dim;
  WAVEKV_CHECK(head.value_dim == dim, "a resident segment has one head dim");
  WAVEKV_CHECK(head.cluster_count <= numbers.cluster_count &&
                   head.first_block[head.cluster_count] <= numbers.block_count,
               "a segment fits its numbers");
  entry.keys_offset = segment.keys_offset;
  entry.values_offset = segment.values_offset;
  entry.window = segment.window;
  entry.token_count = head.token_count;
  for (const std::vector<float>* row : {&head.key_mean, &head.value_mean, &head.spread_shares}) {
    means.insert(means.end(), row->begin(), row->end());
  }
  centroids.resize(size_t{numbers.cluster_count} * dim);
  for (uint32_t c = 0; c < head.cluster_count; ++c) {
    for (uint32_t j = 0; j < dim; ++j) {
      const int code = head.key_codes[KeyCodeIndex(c, j, dim)];
      centroids[size_t{c} * dim + j] = static_cast<int8_t>(code - int{kKeyCodeZero});
    }
  }
  value_means = Padded(head.value_codes, size_t{numbers.cluster_count} * dim);
  centroid_scales = Padded(head.key_scales, numbers.cluster_count);
  value_scales = Padded(head.value_scales, numbers.cluster_count);
  key_spreads = Padded(head.key_spreads, numbers.cluster_count);
  value_spreads = Padded(head.value_spreads, numbers.cluster_count);
  cluster_segment.assign(numbers.cluster_count, static_cast<uint16_t>(numbers.entry));
  first_row.assign(head.first_row.begin(), head.first_row.begin() + head.cluster_count);
  first_row.resize(numbers.cluster_count);
  for (uint32_t c = 0; c < numbers.cluster_count; ++c) {
    first_block.push_back(numbers.first_block + (c < head.cluster_count ? head.first_block[c] : 0));
  }
  block_slots.assign(numbers.block_count, -1);
}

void IndexCopy::AppendCopies(const UnitLayout& layout, uint64_t unit_offset,
                             std::vector<ByteCopy>* copies) const {
  const uint64_t dim = means.size() / 3, cluster = numbers.first_cluster;
  copies->push_back({reinterpret_cast<const std::byte*>(&entry),
                     unit_offset + layout.segments_offset + numbers.entry * sizeof(entry),
                     sizeof(entry)});
  AppendArray(means, unit_offset + layout.means_offset, numbers.entry * 3 * dim, copies);
  AppendArray(centroids, unit_offset + layout.centroids_offset, cluster * dim, copies);
  AppendArray(value_means, unit_offset + layout.value_means_offset, cluster * dim, copies);
  AppendArray(centroid_scales, unit_offset + layout.centroid_scales_offset, cluster, copies);
  AppendArray(value_scales, unit_offset + layout.value_scales_offset, cluster, copies);
  AppendArray(key_spreads, unit_offset + layout.key_spreads_offset, cluster, copies);
  AppendArray(value_spreads, unit_offset + layout.value_spreads_offset, cluster, copies);
  AppendArray(cluster_segment, unit_offset + layout.cluster_segment_offset, cluster, copies);
  AppendArray(first_row, unit_offset + layout.first_row_offset, cluster, copies);
  AppendArray(first_block, unit_offset + layout.first_block_offset, cluster, copies);
  AppendArray(block_slots, unit_offset + layout.block_slots_offset, numbers.first_block, copies);
}

}  // namespace wavekv::resident
