#include "gpu/tenant_buffer.h"

#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv {

namespace {

uint64_t RegionsOffset(uint32_t regions_max) {
  return kBufferPageBytes + AlignUp(regions_max * sizeof(DirectoryEntry), kBufferPageBytes);
}

uint64_t EntryOffset(const RegionPlace& place) {
  return kBufferPageBytes + place.directory_idx * sizeof(DirectoryEntry);
}

}  // namespace

uint64_t TenantBuffer::BytesMin(uint32_t regions_max) {
  return RegionsOffset(regions_max) + kBufferPageBytes;
}

absl::StatusOr<std::shared_ptr<TenantBuffer>> TenantBuffer::Create(
    std::unique_ptr<BufferMemory> memory, uint32_t regions_max) {
  if (memory->bytes() < BytesMin(regions_max) || regions_max == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a wave buffer of ", memory->bytes(), " bytes cannot hold a directory of ", regions_max,
        " regions; expected at least ", BytesMin(regions_max), " bytes and 1 region"));
  }
  std::shared_ptr<TenantBuffer> buffer(
      new TenantBuffer(std::move(memory), regions_max, RegionsOffset(regions_max)));
  WAVEKV_RETURN_IF_ERROR(buffer->WriteHeader(regions_max));
  return buffer;
}

TenantBuffer::TenantBuffer(std::unique_ptr<BufferMemory> memory, uint32_t regions_max,
                           uint64_t regions_offset)
    : memory_(std::move(memory)),
      regions_offset_(regions_offset),
      allocator_((memory_->bytes() - regions_offset) / kBufferPageBytes * kBufferPageBytes) {
  for (uint32_t i = 0; i < regions_max; ++i) {
    free_entries_.push_back(regions_max - 1 - i);  // Lowest last: it is taken first.
  }
}

// The directory is there already: zeroes are free entries.
absl::Status TenantBuffer::WriteHeader(uint32_t regions_max) {
  BufferHeader header{};
  header.magic = kBufferMagic;
  header.version = kBufferLayoutVersion;
  header.directory_entries = regions_max;
  header.buffer_bytes = bytes();
  header.directory_offset = kBufferPageBytes;
  const ByteCopy copy{reinterpret_cast<const std::byte*>(&header), 0, sizeof(header)};
  return memory_->Write({&copy, 1}, BufferWord{offsetof(BufferHeader, state), kBufferLive});
}

absl::StatusOr<RegionPlace> TenantBuffer::Carve(uint64_t wanted_bytes) {
  const uint64_t wanted = AlignUp(wanted_bytes, kBufferPageBytes);
  Sweep();
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

absl::Status TenantBuffer::Announce(const RegionPlace& place, SequenceId sequence) {
  DirectoryEntry entry{};
  entry.region_offset = place.offset;
  entry.region_bytes = place.bytes;
  const uint64_t offset = EntryOffset(place);
  const ByteCopy copy{reinterpret_cast<const std::byte*>(&entry), offset, sizeof(entry)};
  return memory_->Write(
      {&copy, 1}, BufferWord{offset + offsetof(DirectoryEntry, sequence_id), sequence.value()});
}

absl::Status TenantBuffer::Withdraw(const RegionPlace& place) {
  return memory_->Store(EntryOffset(place) + offsetof(DirectoryEntry, sequence_id), 0);
}

void TenantBuffer::Return(const RegionPlace& place) {
  MutexLock lock(&mutex_);
  free_entries_.push_back(place.directory_idx);
  allocator_.Free(place.offset - regions_offset_, place.bytes);
}

void TenantBuffer::ReturnLater(const RegionPlace& place,
                               std::function<absl::StatusOr<bool>()> wipe) {
  {
    MutexLock lock(&sweep_mutex_);
    late_.push_back({place, std::move(wipe)});
  }
  Sweep();
}

size_t TenantBuffer::Sweep() {
  MutexLock lock(&sweep_mutex_);
  std::erase_if(late_, [this](const LateReturn& late) {
    const absl::StatusOr<bool> wiped = late.wipe();
    if (wiped.ok() && *wiped) Return(late.place);
    // What failed for want of memory may work next time; a device that is gone has no next time.
    return wiped.ok() ? *wiped : !absl::IsResourceExhausted(wiped.status());
  });
  return late_.size();
}

absl::Status TenantBuffer::Close() {
  return memory_->Store(offsetof(BufferHeader, state), kBufferClosed);
}

uint64_t TenantBuffer::free_bytes() const {
  MutexLock lock(&mutex_);
  return allocator_.free_bytes();
}

}  // namespace wavekv
