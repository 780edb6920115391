// Who has which bytes of an arena: first fit over the free extents.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace wavekv::shm {

// Offsets and sizes in multiples of kArenaAlignment. Not thread-safe.
class ArenaAllocator {
 public:
  // Of [begin, begin + bytes).
  ArenaAllocator(uint64_t begin, uint64_t bytes);

  // The offset of `bytes` (> 0, rounded up), or nothing while no free extent is that long.
  std::optional<uint64_t> Allocate(uint64_t bytes);
  // Gives back what Allocate(bytes) returned.
  void Free(uint64_t offset, uint64_t bytes);

  uint64_t free_bytes() const { return free_bytes_; }
  uint64_t total_bytes() const { return total_bytes_; }

 private:
  const uint64_t total_bytes_;
  uint64_t free_bytes_;
  std::map<uint64_t, uint64_t> free_;  // Offset -> bytes; neighbours are merged.
};

}  // namespace wavekv::shm
