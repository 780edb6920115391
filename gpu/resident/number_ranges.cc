#include "gpu/resident/number_ranges.h"

namespace wavekv::resident {
namespace {

constexpr uint64_t kGrain = BestFitAllocator::kGranularityBytes;

}  // namespace

NumberRanges::NumberRanges(uint32_t capacity, uint32_t unit)
    : unit_(unit), ranges_(capacity / unit * kGrain) {}

uint64_t NumberRanges::Bytes(uint32_t count) const {
  return (uint64_t{count} + unit_ - 1) / unit_ * kGrain;
}

std::optional<uint32_t> NumberRanges::Take(uint32_t count) {
  if (count == 0) return 0;
  const std::optional<uint64_t> offset = ranges_.Allocate(Bytes(count));
  if (!offset.has_value()) return std::nullopt;
  return static_cast<uint32_t>(*offset / kGrain * unit_);
}

void NumberRanges::GiveBack(uint32_t first, uint32_t count) {
  if (count > 0) ranges_.Free(first / unit_ * kGrain, Bytes(count));
}

uint32_t NumberRanges::free_count() const {
  return static_cast<uint32_t>(ranges_.free_bytes() / kGrain * unit_);
}

}  // namespace wavekv::resident
