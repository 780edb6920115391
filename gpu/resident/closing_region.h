// A closed resident region that steps under way may still read and write.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu/buffer_memory.h"
#include "gpu/resident/resident_layout.h"
#include "gpu/tenant_buffer.h"
#include "storage/base/ids.h"

namespace wavekv::resident {

// Not thread-safe: the buffer asks one at a time.
class ClosingRegion {
 public:
  // `memory` outlives it. `kept` is what steps may read outside of the region; released with it.
  ClosingRegion(BufferMemory& memory, const RegionPlace& place, const ResidentHeader& header,
                std::function<bool()> engine_is_gone,
                std::vector<std::shared_ptr<const void>> kept);

  // Wipes the region if no step can touch it any more: all those that had started when this was
  // first asked are completed, or their process is gone. Else says false. The memory's failure.
  absl::StatusOr<bool> TryWipe();

 private:
  absl::StatusOr<bool> StepsAreOver();

  BufferMemory& memory_;
  const RegionPlace place_;
  const ResidentHeader header_;
  const std::function<bool()> engine_is_gone_;
  const std::vector<std::shared_ptr<const void>> kept_;
  std::vector<uint64_t> epochs_;  // [units] started when first asked.
};

// The states of units [first_unit, first_unit + count) of a region at `region_offset`.
absl::StatusOr<std::vector<gpu::HeadState>> ReadStates(BufferMemory& memory, uint64_t region_offset,
                                                       const ResidentHeader& header,
                                                       uint32_t first_unit, uint32_t count);

}  // namespace wavekv::resident
