#include "index/segment.h"

namespace wavekv {
namespace {

template <class T>
uint64_t VectorBytes(const std::vector<T>& v) {
  return v.size() * sizeof(T);
}

}  // namespace

uint64_t SegmentHead::index_bytes() const {
  return rank_read_bytes() + VectorBytes(value_mean) + VectorBytes(value_codes) +
         VectorBytes(value_scales) + VectorBytes(sizes) + VectorBytes(radii) + VectorBytes(deltas) +
         VectorBytes(value_radii) + VectorBytes(first_row) + VectorBytes(first_block) +
         VectorBytes(row_to_offset) + sketch.bytes();
}

uint64_t SegmentHead::rank_read_bytes() const {
  return VectorBytes(key_mean) + VectorBytes(key_codes) + VectorBytes(key_scales) +
         VectorBytes(log_sizes) + VectorBytes(key_spreads) + VectorBytes(value_spreads) +
         VectorBytes(spread_shares);
}

std::vector<double> StoredCentroid(const SegmentHead& segment, uint32_t cluster) {
  std::vector<double> row(segment.key_dim);
  for (uint32_t j = 0; j < segment.key_dim; ++j) {
    const int code =
        segment.key_codes[KeyCodeIndex(cluster, j, segment.key_dim)] - int{kKeyCodeZero};
    row[j] = segment.key_mean[j] + double{segment.key_scales[cluster]} * code;
  }
  return row;
}

std::vector<double> StoredValueMean(const SegmentHead& segment, uint32_t cluster) {
  std::vector<double> row(segment.value_dim);
  const int8_t* codes = &segment.value_codes[size_t{cluster} * segment.value_dim];
  for (uint32_t j = 0; j < segment.value_dim; ++j) {
    row[j] = segment.value_mean[j] + double{segment.value_scales[cluster]} * codes[j];
  }
  return row;
}

}  // namespace wavekv
