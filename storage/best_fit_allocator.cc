#include "storage/best_fit_allocator.h"

#include <iterator>
#include <limits>

#include "storage/base/check.h"

namespace wavekv {

BestFitAllocator::BestFitAllocator(uint64_t bytes) : bytes_(bytes - bytes % kGranularityBytes) {
  if (bytes_ > 0) Insert(0, bytes_);
}

std::optional<uint64_t> BestFitAllocator::RoundUp(uint64_t bytes) {
  if (bytes > std::numeric_limits<uint64_t>::max() - (kGranularityBytes - 1)) return std::nullopt;
  return (bytes + kGranularityBytes - 1) / kGranularityBytes * kGranularityBytes;
}

std::optional<uint64_t> BestFitAllocator::Allocate(uint64_t bytes) {
  WAVEKV_CHECK(bytes > 0 && bytes % kGranularityBytes == 0, "run size is not rounded up");
  const auto found = by_size_.lower_bound({bytes, 0});
  if (found == by_size_.end()) return std::nullopt;
  const auto [piece_bytes, offset] = *found;
  Erase(by_offset_.find(offset));
  if (piece_bytes > bytes) Insert(offset + bytes, piece_bytes - bytes);
  return offset;
}

void BestFitAllocator::Free(uint64_t offset, uint64_t bytes) {
  WAVEKV_CHECK(bytes > 0 && bytes <= bytes_ && offset <= bytes_ - bytes, "run is out of range");
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.end()) {
    WAVEKV_CHECK(offset + bytes <= next->first, "run is free already");
    if (next->first == offset + bytes) {
      bytes += next->second;
      const auto joined = next++;
      Erase(joined);
    }
  }
  if (next != by_offset_.begin()) {
    const auto previous = std::prev(next);
    const uint64_t previous_end = previous->first + previous->second;
    WAVEKV_CHECK(previous_end <= offset, "run is free already");
    if (previous_end == offset) {
      offset = previous->first;
      bytes += previous->second;
      Erase(previous);
    }
  }
  Insert(offset, bytes);
}

void BestFitAllocator::Insert(uint64_t offset, uint64_t bytes) {
  by_offset_.emplace(offset, bytes);
  by_size_.emplace(bytes, offset);
  free_bytes_ += bytes;
}

void BestFitAllocator::Erase(std::map<uint64_t, uint64_t>::iterator piece) {
  by_size_.erase({piece->second, piece->first});
  free_bytes_ -= piece->second;
  by_offset_.erase(piece);
}

}  // namespace wavekv
