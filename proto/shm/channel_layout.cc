#include "proto/shm/channel_layout.h"

#include "absl/strings/str_cat.h"

namespace wavekv::shm {
namespace {

constexpr uint64_t kPageBytes = 4096;

constexpr uint64_t RoundUpToPage(uint64_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

}  // namespace

absl::StatusOr<ChannelGeometry> LayOutChannel(uint32_t ring_entries, uint64_t arena_bytes) {
  if (ring_entries < kRingEntriesMin || ring_entries > kRingEntriesMax ||
      !std::has_single_bit(ring_entries)) {
    return absl::InvalidArgumentError(absl::StrCat("channel: ring_entries is ", ring_entries,
                                                   ", expected a power of two from ",
                                                   kRingEntriesMin, " to ", kRingEntriesMax));
  }
  if (arena_bytes < kArenaBytesMin || arena_bytes > kArenaBytesMax ||
      arena_bytes % kPageBytes != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("channel: arena_bytes is ", arena_bytes, ", expected a multiple of ",
                     kPageBytes, " from ", kArenaBytesMin, " to ", kArenaBytesMax));
  }
  ChannelGeometry geometry;
  geometry.ring_entries = ring_entries;
  geometry.submissions_offset = kPageBytes;
  geometry.completions_offset =
      RoundUpToPage(geometry.submissions_offset + ring_entries * sizeof(SubmissionEntry));
  geometry.arena_offset =
      RoundUpToPage(geometry.completions_offset + ring_entries * sizeof(CompletionEntry));
  geometry.arena_bytes = arena_bytes;
  geometry.channel_bytes = geometry.arena_offset + arena_bytes;
  return geometry;
}

ChannelHeader HeaderOf(const ChannelGeometry& geometry) {
  ChannelHeader header;
  header.ring_entries = geometry.ring_entries;
  header.channel_bytes = geometry.channel_bytes;
  header.submissions_offset = geometry.submissions_offset;
  header.completions_offset = geometry.completions_offset;
  header.arena_offset = geometry.arena_offset;
  header.arena_bytes = geometry.arena_bytes;
  return header;
}

absl::StatusOr<ChannelGeometry> ReadHeader(const ChannelHeader& header, uint64_t channel_bytes) {
  if (header.magic != kChannelMagic) return absl::DataLossError("channel: no header");
  if (header.version != kChannelVersion) {
    return absl::FailedPreconditionError(absl::StrCat("channel: the daemon's layout has version ",
                                                      header.version, ", this client knows ",
                                                      kChannelVersion));
  }
  const absl::StatusOr<ChannelGeometry> geometry =
      LayOutChannel(header.ring_entries, header.arena_bytes);
  // One version has one layout: what the header says must be what these two numbers give.
  if (!geometry.ok() || header.channel_bytes != geometry->channel_bytes ||
      header.submissions_offset != geometry->submissions_offset ||
      header.completions_offset != geometry->completions_offset ||
      header.arena_offset != geometry->arena_offset || channel_bytes != geometry->channel_bytes) {
    return absl::DataLossError(
        absl::StrCat("channel: the header contradicts itself: ", header.ring_entries,
                     " entries at ", header.submissions_offset, " and ", header.completions_offset,
                     ", an arena of ", header.arena_bytes, " bytes at ", header.arena_offset, ", ",
                     header.channel_bytes, " bytes in all, of ", channel_bytes));
  }
  return geometry;
}

}  // namespace wavekv::shm
