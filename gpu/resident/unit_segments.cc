#include "gpu/resident/unit_segments.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "gpu/buffer_layout.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace wavekv::resident {

UnitSegments::UnitSegments(const UnitLayout& layout)
    : entries_(layout.segment_capacity, 1),
      clusters_(layout.cluster_capacity, gpu::kClusterPad),
      blocks_(layout.block_capacity, 1) {}

absl::StatusOr<SegmentNumbers> UnitSegments::TakeNumbers(const SegmentHead& head) {
  SegmentNumbers numbers;
  numbers.cluster_count = static_cast<uint32_t>(AlignUp(head.cluster_count, gpu::kClusterPad));
  numbers.block_count = head.first_block[head.cluster_count];
  WAVEKV_CHECK(numbers.block_count > 0, "a segment has tokens");
  const std::optional<uint32_t> entry = entries_.Take(1);
  const std::optional<uint32_t> cluster = clusters_.Take(numbers.cluster_count);
  const std::optional<uint32_t> block = blocks_.Take(numbers.block_count);
  if (entry.has_value() && cluster.has_value() && block.has_value()) {
    numbers.entry = *entry;
    numbers.first_cluster = *cluster;
    numbers.first_block = *block;
    return numbers;
  }
  if (entry.has_value()) entries_.GiveBack(*entry, 1);
  if (cluster.has_value()) clusters_.GiveBack(*cluster, numbers.cluster_count);
  if (block.has_value()) blocks_.GiveBack(*block, numbers.block_count);
  return absl::ResourceExhaustedError(absl::StrCat(
      "the index does not fit the sequence's resident region: a segment of ", head.cluster_count,
      " clusters and ", numbers.block_count, " blocks, free are ", entries_.free_count(),
      " segments, ", clusters_.free_count(), " clusters and ", blocks_.free_count(),
      " blocks; create the sequence with more max_tokens or more tokens per cluster"));
}

void UnitSegments::GiveBack(const SegmentNumbers& numbers) {
  entries_.GiveBack(numbers.entry, 1);
  clusters_.GiveBack(numbers.first_cluster, numbers.cluster_count);
  blocks_.GiveBack(numbers.first_block, numbers.block_count);
}

absl::StatusOr<UnitSegments::Version> UnitSegments::Plan(
    std::span<const ResidentSegment> segments) {
  Version version;
  for (const ResidentSegment& segment : segments) {
    const auto known = live_.find(segment.head->uid);
    if (known != live_.end()) {
      version.segments.push_back(known->second);
      continue;
    }
    absl::StatusOr<SegmentNumbers> numbers = TakeNumbers(*segment.head);
    if (!numbers.ok()) {
      Abandon(version);
      return numbers.status();
    }
    version.fresh.push_back(version.segments.size());
    version.segments.push_back({segment, *numbers});
  }
  return version;
}

void UnitSegments::Abandon(const Version& version) {
  for (const size_t i : version.fresh) GiveBack(version.segments[i].numbers);
}

std::vector<PlacedSegment> UnitSegments::Commit(const Version& version) {
  for (const size_t i : version.fresh) {
    const PlacedSegment& placed = version.segments[i];
    WAVEKV_CHECK(live_.emplace(placed.segment.head->uid, placed).second, "a segment comes once");
    by_block_.insert(Find(placed.numbers.first_block), {placed.numbers.first_block,
                                                        placed.numbers.block_count,
                                                        {placed.segment.head->uid, /*live=*/true}});
  }
  absl::flat_hash_set<uint64_t> kept;
  for (const PlacedSegment& placed : version.segments) kept.insert(placed.segment.head->uid);
  std::vector<PlacedSegment> gone;
  for (const auto& [uid, placed] : live_) {
    if (!kept.contains(uid)) gone.push_back(placed);
  }
  for (const PlacedSegment& placed : gone) {
    live_.erase(placed.segment.head->uid);
    Find(placed.numbers.first_block)->owner.live = false;
    leaving_.push_back({placed});
  }
  return gone;
}

std::vector<UnitSegments::Owned>::iterator UnitSegments::Find(uint32_t first_block) {
  return std::lower_bound(
      by_block_.begin(), by_block_.end(), first_block,
      [](const Owned& owned, uint32_t block) { return owned.first_block < block; });
}

std::optional<BlockOwner> UnitSegments::OwnerOf(uint32_t block) const {
  // The last that begins at or before it.
  auto after = std::upper_bound(
      by_block_.begin(), by_block_.end(), block,
      [](uint32_t wanted, const Owned& owned) { return wanted < owned.first_block; });
  if (after == by_block_.begin()) return std::nullopt;
  --after;
  if (block - after->first_block >= after->block_count) return std::nullopt;
  return after->owner;
}

void UnitSegments::Read(uint64_t started, uint64_t completed, uint64_t log_settled) {
  for (Leaving& leaving : leaving_) {
    if (leaving.passed && leaving.log_mark == kUnknown) leaving.log_mark = log_settled;
    if (leaving.epoch == kUnknown) leaving.epoch = started;
    leaving.passed = leaving.passed || completed >= leaving.epoch;
  }
}

void UnitSegments::Release(uint64_t log_read, bool doubts) {
  if (doubts) return;
  std::erase_if(leaving_, [&](const Leaving& leaving) {
    if (leaving.log_mark == kUnknown || log_read < leaving.log_mark) return false;
    GiveBack(leaving.placed.numbers);
    by_block_.erase(Find(leaving.placed.numbers.first_block));
    return true;
  });
}

}  // namespace wavekv::resident
