// Numbers of clusters, blocks or segment entries of one unit.
#pragma once

#include <cstdint>
#include <optional>

#include "storage/best_fit_allocator.h"

namespace wavekv::resident {

// Hands out ranges of consecutive numbers of [0, capacity). Not thread-safe.
class NumberRanges {
 public:
  // Ranges begin at multiples of `unit` and take whole ones.
  NumberRanges(uint32_t capacity, uint32_t unit);

  // The first of `count` numbers; nullopt: no such range is free. A range of none is number 0.
  std::optional<uint32_t> Take(uint32_t count);
  // Gives back what Take gave.
  void GiveBack(uint32_t first, uint32_t count);

  uint32_t free_count() const;

 private:
  uint64_t Bytes(uint32_t count) const;

  const uint32_t unit_;
  BestFitAllocator ranges_;  // A unit is one of its grains.
};

}  // namespace wavekv::resident
