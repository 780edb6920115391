// Which segments of a unit have which numbers, and since when nobody can see them. Bookkeeping:
// touches no memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/resident/cache_books.h"
#include "gpu/resident/index_copy.h"
#include "gpu/resident/number_ranges.h"
#include "gpu/resident/resident_layout.h"
#include "index/backend/resident.h"

namespace wavekv::resident {

// A segment and its numbers; keeps the owner of its rows.
struct PlacedSegment {
  ResidentSegment segment;
  SegmentNumbers numbers;
};

// Not thread-safe.
class UnitSegments {
 public:
  explicit UnitSegments(const UnitLayout& layout);

  // What a version has, in order of position, and which of it is not on the device yet.
  struct Version {
    std::vector<PlacedSegment> segments;
    std::vector<size_t> fresh;  // Indices of `segments`.
  };
  // Takes numbers for what is new. ResourceExhausted: too few are free; none is taken then.
  absl::StatusOr<Version> Plan(std::span<const ResidentSegment> segments);
  // Gives a version up that was planned.
  void Abandon(const Version& version);

  // The version is published: returns the segments that it does not have any more. Their numbers
  // are free once no step can see them.
  std::vector<PlacedSegment> Commit(const Version& version);

  std::optional<BlockOwner> OwnerOf(uint32_t block) const;

  // A reading of the state that began after the last Commit.
  void Read(uint64_t started, uint64_t completed, uint64_t log_settled);
  // Frees numbers that no step can see or claim for any more. The log was read as far as
  // `log_read`; `doubts`: what it said before is not known completely.
  void Release(uint64_t log_read, bool doubts);
  bool waits() const { return !leaving_.empty(); }

  uint32_t free_clusters() const { return clusters_.free_count(); }

 private:
  static constexpr uint64_t kUnknown = ~uint64_t{0};
  // Steps that saw the segment go on; then the log must be read as far as a later reading says.
  struct Leaving {
    PlacedSegment placed;
    uint64_t epoch = kUnknown;
    bool passed = false;
    uint64_t log_mark = kUnknown;
  };

  absl::StatusOr<SegmentNumbers> TakeNumbers(const SegmentHead& head);
  void GiveBack(const SegmentNumbers& numbers);

  NumberRanges entries_, clusters_, blocks_;
  absl::flat_hash_map<uint64_t, PlacedSegment> live_;  // By uid.
  std::vector<Leaving> leaving_;
  struct Owned {
    uint32_t first_block = 0;
    uint32_t block_count = 0;
    BlockOwner owner;
  };
  std::vector<Owned>::iterator Find(uint32_t first_block);
  std::vector<Owned> by_block_;  // Ascending: whose a block is, of all segments that have numbers.
};

}  // namespace wavekv::resident
