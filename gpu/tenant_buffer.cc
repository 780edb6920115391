#include "gpu/tenant_buffer.h"

#include <new>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"

namespace wavekv {

namespace {

uint64_t RegionsOffset(uint32_t regions_max) {
  return kBufferPageBytes + AlignUp(regions_max * sizeof(DirectoryEntry), kBufferPageBytes);
}

}  // namespace

uint64_t TenantBuffer::BytesMin(uint32_t regions_max) {
  return RegionsOffset(regions_max) + kBufferPageBytes;
}

absl::StatusOr<std::shared_ptr<TenantBuffer>> TenantBuffer::Create(Mapping mapping,
                                                                   uint32_t regions_max) {
  if (mapping.bytes() < BytesMin(regions_max) || regions_max == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a wave buffer of ", mapping.bytes(), " bytes cannot hold a directory of ", regions_max,
        " regions; expected at least ", BytesMin(regions_max), " bytes and 1 region"));
  }
  return std::shared_ptr<TenantBuffer>(
      new TenantBuffer(std::move(mapping), regions_max, RegionsOffset(regions_max)));
}

TenantBuffer::TenantBuffer(Mapping mapping, uint32_t regions_max, uint64_t regions_offset)
    : mapping_(std::move(mapping)),
      regions_offset_(regions_offset),
      allocator_((mapping_.bytes() - regions_offset) / kBufferPageBytes * kBufferPageBytes) {
  for (uint32_t i = 0; i < regions_max; ++i) {
    new (entry(i)) DirectoryEntry{};
    free_entries_.push_back(regions_max - 1 - i);  // Lowest last: it is taken first.
  }
  auto* header = new (data()) BufferHeader{};
  header->magic = kBufferMagic;
  header->version = kBufferLayoutVersion;
  header->directory_entries = regions_max;
  header->buffer_bytes = bytes();
  header->directory_offset = kBufferPageBytes;
  header->state.store(kBufferLive, std::memory_order_release);
}

absl::StatusOr<RegionPlace> TenantBuffer::Carve(uint64_t wanted_bytes) {
  const uint64_t wanted = AlignUp(wanted_bytes, kBufferPageBytes);
  MutexLock lock(&mutex_);
  if (free_entries_.empty()) {
    return absl::ResourceExhaustedError("every entry of the buffer's directory is taken");
  }
  const std::optional<uint64_t> offset = allocator_.Allocate(wanted);
  if (!offset.has_value()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("a region of ", wanted, " bytes does not fit the tenant's buffer of ", bytes(),
                     " bytes, whose largest free piece has ", allocator_.largest_free_bytes()));
  }
  const RegionPlace place{regions_offset_ + *offset, wanted, free_entries_.back()};
  free_entries_.pop_back();
  return place;
}

void TenantBuffer::Announce(const RegionPlace& place, SequenceId sequence) {
  DirectoryEntry* found = entry(place.directory_idx);
  found->region_offset = place.offset;
  found->region_bytes = place.bytes;
  found->sequence_id.store(sequence.value(), std::memory_order_release);
}

void TenantBuffer::Withdraw(const RegionPlace& place) {
  entry(place.directory_idx)->sequence_id.store(0, std::memory_order_release);
}

void TenantBuffer::Return(const RegionPlace& place) {
  MutexLock lock(&mutex_);
  free_entries_.push_back(place.directory_idx);
  allocator_.Free(place.offset - regions_offset_, place.bytes);
}

void TenantBuffer::Close() { header()->state.store(kBufferClosed, std::memory_order_release); }

uint64_t TenantBuffer::free_bytes() const {
  MutexLock lock(&mutex_);
  return allocator_.free_bytes();
}

}  // namespace wavekv
