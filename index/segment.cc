#include "index/segment.h"

namespace wavekv {
namespace {

template <class T>
uint64_t VectorBytes(const std::vector<T>& v) {
  return v.size() * sizeof(T);
}

}  // namespace

uint64_t SegmentHead::index_bytes() const {
  return VectorBytes(centroids) + VectorBytes(value_means) + VectorBytes(sizes) +
         VectorBytes(radii) + VectorBytes(deltas) + VectorBytes(value_radii) +
         VectorBytes(key_spreads) + VectorBytes(value_spreads) + VectorBytes(spread_shares) +
         VectorBytes(first_row) + VectorBytes(first_block) + VectorBytes(row_to_offset) +
         sketch.bytes();
}

uint64_t SegmentHead::index_read_bytes() const {
  return VectorBytes(centroids) + VectorBytes(value_means) + VectorBytes(sizes) +
         VectorBytes(key_spreads) + VectorBytes(value_spreads) + VectorBytes(spread_shares);
}

}  // namespace wavekv
