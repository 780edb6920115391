#include "gpu/resident/unit_version.h"

#include <algorithm>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace wavekv::resident {
namespace {

absl::Status CheckRoom(const UnitLayout& layout, const ResidentLayer& view) {
  if (view.sink_count > kSinkRows) {
    return absl::FailedPreconditionError(
        absl::StrCat("the sequence keeps ", view.sink_count,
                     " first tokens exact, a resident region has room for ", kSinkRows));
  }
  if (view.token_count <= RingEnd(layout, view.steady_first)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("tokens ", view.steady_first, " to ", view.token_count,
                   " are not in the index, the region's ring holds ", layout.ring_rows,
                   " exact ones: build the index first"));
}

// Segments follow one another from the first tokens to the exact ones.
void CheckCovers(const ResidentLayer& view, uint32_t kv_head) {
  WAVEKV_CHECK(kv_head < view.heads.size(), "a view has every KV head");
  uint64_t covered = view.sink_count;
  for (const ResidentSegment& segment : view.heads[kv_head]) {
    WAVEKV_CHECK(segment.head->first_position == covered, "segments follow one another");
    covered = segment.head->end_position();
  }
  WAVEKV_CHECK(view.heads[kv_head].empty() || covered == view.steady_first,
               "what no segment covers is exact");
}

}  // namespace

absl::StatusOr<UnitVersion> PlanUnitVersion(const UnitLayout& layout, const ResidentLayer& view,
                                            uint32_t kv_head, UnitSegments* segments) {
  CheckCovers(view, kv_head);
  WAVEKV_RETURN_IF_ERROR(CheckRoom(layout, view));
  UnitVersion version;
  WAVEKV_ASSIGN_OR_RETURN(version.segments, segments->Plan(view.heads[kv_head]));
  PublishedHead& published = version.published;
  published.version = view.version;
  published.steady_first = view.steady_first;
  published.sink_count = view.sink_count;
  uint32_t cluster_count = 0;  // Those with a size.
  for (const PlacedSegment& placed : version.segments.segments) {
    const SegmentNumbers& numbers = placed.numbers;
    const SegmentHead& head = *placed.segment.head;
    cluster_count += head.cluster_count;
    published.cluster_count =
        std::max(published.cluster_count, numbers.first_cluster + numbers.cluster_count);
    published.segment_count = std::max(published.segment_count, numbers.entry + 1);
    for (const float scale : head.value_scales) {
      published.value_scale_max = std::max(published.value_scale_max, scale);
    }
  }
  published.retrieve_count = std::min({view.retrieve_count, cluster_count, gpu::kRetrieveMax});
  version.sizes.resize(published.cluster_count);
  for (const PlacedSegment& placed : version.segments.segments) {
    const std::vector<uint16_t>& sizes = placed.segment.head->sizes;
    std::copy(sizes.begin(), sizes.end(), version.sizes.begin() + placed.numbers.first_cluster);
  }
  for (const size_t i : version.segments.fresh) {
    const PlacedSegment& placed = version.segments.segments[i];
    version.fresh.emplace_back(placed.segment, placed.numbers);
  }
  return version;
}

void AppendVersion(const UnitLayout& layout, uint64_t unit_offset, uint32_t area,
                   const UnitVersion& version, std::vector<ByteCopy>* copies) {
  for (const IndexCopy& copy : version.fresh) copy.AppendCopies(layout, unit_offset, copies);
  copies->push_back({reinterpret_cast<const std::byte*>(&version.published),
                     unit_offset + layout.published_offset + area * sizeof(PublishedHead),
                     sizeof(PublishedHead)});
  if (version.sizes.empty()) return;
  const uint64_t sizes_bytes = uint64_t{layout.cluster_capacity} * sizeof(uint16_t);
  copies->push_back({reinterpret_cast<const std::byte*>(version.sizes.data()),
                     unit_offset + layout.sizes_offset + area * sizes_bytes,
                     version.sizes.size() * sizeof(uint16_t)});
}

}  // namespace wavekv::resident
