// One unit's part of a version of the index on its way to the device.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "gpu/buffer_memory.h"
#include "gpu/resident/index_copy.h"
#include "gpu/resident/resident_layout.h"
#include "gpu/resident/unit_segments.h"
#include "index/backend/resident.h"

namespace wavekv::resident {

struct UnitVersion {
  UnitSegments::Version segments;
  std::vector<IndexCopy> fresh;  // Of the segments that are not on the device yet.
  PublishedHead published = {};
  std::vector<uint16_t> sizes;  // [published.cluster_count]
};

// KV head `kv_head` of `view`, with numbers out of `segments`. FailedPrecondition: more exact
// tokens or first tokens than the unit has room for. ResourceExhausted: too few numbers are free.
// None is taken then.
absl::StatusOr<UnitVersion> PlanUnitVersion(const UnitLayout& layout, const ResidentLayer& view,
                                            uint32_t kv_head, UnitSegments* segments);

// Where the version's bytes go when it gets area `area` of a unit that begins at `unit_offset` of
// the buffer. They are borrowed.
void AppendVersion(const UnitLayout& layout, uint64_t unit_offset, uint32_t area,
                   const UnitVersion& version, std::vector<ByteCopy>* copies);

// The most exact tokens that a version leaves room for end here.
constexpr uint64_t RingEnd(const UnitLayout& layout, uint64_t steady_first) {
  return steady_first / gpu::kBlockRows * gpu::kBlockRows + layout.ring_rows;
}

}  // namespace wavekv::resident
