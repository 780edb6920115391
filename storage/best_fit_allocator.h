// Places runs in a range of bytes: pure bookkeeping, touches no memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace wavekv {

// Best fit: the smallest free piece that is large enough, of equals the one at the lowest offset.
// Neighbouring free pieces are joined at once. O(log pieces). Not thread-safe.
class BestFitAllocator {
 public:
  // Offsets and sizes of runs are multiples of this: a cache line, and enough for any vector load.
  static constexpr uint64_t kGranularityBytes = 64;

  // Manages [0, bytes); a rest below the granularity is not used.
  explicit BestFitAllocator(uint64_t bytes);

  // Size that a run of `bytes` occupies; nullopt when it overflows.
  static std::optional<uint64_t> RoundUp(uint64_t bytes);

  // Offset of a run of `bytes`, a multiple of the granularity above 0; nullopt when nothing fits.
  std::optional<uint64_t> Allocate(uint64_t bytes);

  // Gives back exactly what Allocate gave. A run that is free already, even in part, aborts.
  void Free(uint64_t offset, uint64_t bytes);

  uint64_t free_bytes() const { return free_bytes_; }
  uint64_t largest_free_bytes() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  size_t piece_count() const { return by_offset_.size(); }

 private:
  void Insert(uint64_t offset, uint64_t bytes);
  void Erase(std::map<uint64_t, uint64_t>::iterator piece);

  uint64_t bytes_;
  uint64_t free_bytes_ = 0;
  std::map<uint64_t, uint64_t> by_offset_;           // Free pieces: offset -> bytes.
  std::set<std::pair<uint64_t, uint64_t>> by_size_;  // The same: (bytes, offset).
};

}  // namespace wavekv
