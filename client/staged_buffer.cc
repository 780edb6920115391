#include "client/staged_buffer.h"

#include <atomic>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// docs/formats.md. Offsets of fields from the start of their record; all little endian.
constexpr uint64_t kBufferMagic = 0x3146554245564157;  // "WAVEBUF1"
constexpr uint64_t kRegionMagic = 0x3147455245564157;  // "WAVEREG1"
constexpr uint32_t kLayoutVersion = 1;
constexpr uint64_t kStateLive = 1;

constexpr uint64_t kHeaderBytes = 40;
constexpr uint64_t kHeaderVersion = 8;
constexpr uint64_t kHeaderEntries = 12;
constexpr uint64_t kHeaderDirectory = 24;
constexpr uint64_t kHeaderState = 32;

constexpr uint64_t kEntryBytes = 32;
constexpr uint64_t kEntryRegionOffset = 8;
constexpr uint64_t kEntryRegionBytes = 16;

constexpr uint64_t kRegionBytesMin = 128;
constexpr uint64_t kRegionSequence = 8;
constexpr uint64_t kRegionStep = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<const StagedBuffer>> StagedBuffer::Open(
    const BufferAccess& access, std::chrono::milliseconds timeout) {
  WAVEKV_ASSIGN_OR_RETURN(const UniqueFd descriptor,
                          FetchDescriptor(access.socket, access.ticket, timeout));
  const int fd = descriptor.get();
  WAVEKV_RETURN_IF_ERROR(CheckSizeSealed(fd));
  WAVEKV_ASSIGN_OR_RETURN(const uint64_t bytes, FileBytes(fd));
  if (bytes < access.bytes || bytes < kHeaderBytes) {
    return absl::DataLossError(absl::StrCat("wave buffer: ", bytes, " bytes, expected ",
                                            access.bytes, " as the daemon said"));
  }
  WAVEKV_ASSIGN_OR_RETURN(Mapping mapping, Mapping::Map(fd, bytes, Mapping::kReadOnly));
  std::shared_ptr<StagedBuffer> buffer(new StagedBuffer(std::move(mapping)));
  WAVEKV_RETURN_IF_ERROR(buffer->ReadHeader());
  return buffer;
}

uint64_t StagedBuffer::Load64(uint64_t offset) const {
  return __atomic_load_n(reinterpret_cast<const uint64_t*>(mapping_.data() + offset),
                         __ATOMIC_ACQUIRE);
}

uint32_t StagedBuffer::Load32(uint64_t offset) const {
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(mapping_.data() + offset),
                         __ATOMIC_ACQUIRE);
}

bool StagedBuffer::Contains(uint64_t offset, uint64_t bytes) const {
  return offset % sizeof(uint64_t) == 0 && offset <= mapping_.bytes() &&
         bytes <= mapping_.bytes() - offset;
}

absl::Status StagedBuffer::ReadHeader() {
  const uint64_t magic = Load64(0);
  const uint32_t version = Load32(kHeaderVersion);
  directory_entries_ = Load32(kHeaderEntries);
  directory_offset_ = Load64(kHeaderDirectory);
  if (magic == kBufferMagic && version == kLayoutVersion &&
      Contains(directory_offset_, directory_entries_ * kEntryBytes)) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("wave buffer: the header has magic ", absl::Hex(magic),
                                          ", version ", version, " and ", directory_entries_,
                                          " entries at ", directory_offset_, "; expected magic ",
                                          absl::Hex(kBufferMagic), ", version ", kLayoutVersion,
                                          " and a directory within ", mapping_.bytes(), " bytes"));
}

absl::StatusOr<StagedRegion> StagedBuffer::FindStep(uint64_t sequence_id, uint64_t step) const {
  // Rows that the caller has read were read before what is looked at here.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (Load64(kHeaderState) != kStateLive) {
    return absl::NotFoundError("wave buffer: closed by the daemon");
  }
  for (uint32_t i = 0; i < directory_entries_; ++i) {
    const uint64_t entry = directory_offset_ + i * kEntryBytes;
    if (Load64(entry) != sequence_id) continue;
    const StagedRegion region{.offset = Load64(entry + kEntryRegionOffset),
                              .bytes = Load64(entry + kEntryRegionBytes)};
    if (region.bytes < kRegionBytesMin || !Contains(region.offset, region.bytes) ||
        Load64(region.offset) != kRegionMagic) {
      return absl::DataLossError(absl::StrCat(
          "wave buffer: sequence ", sequence_id, " has ", region.bytes, " bytes at ", region.offset,
          ", which is no region of a buffer of ", mapping_.bytes(), " bytes"));
    }
    const uint64_t ready = Load64(region.offset + kRegionStep);
    if (Load64(region.offset + kRegionSequence) != sequence_id || ready < step) break;
    return region;
  }
  return absl::NotFoundError(absl::StrCat("wave buffer: step ", step, " of sequence ", sequence_id,
                                          " is not here; was it given back, or wavebufferd "
                                          "restarted?"));
}

absl::StatusOr<std::shared_ptr<const StagedBuffer>> StagedBufferCache::Get(
    const BufferAccess& access, std::chrono::milliseconds timeout) {
  if (access.ticket.empty()) {
    return absl::FailedPreconditionError(
        "the daemon has no wave buffer in host memory: start wavebufferd, and wavekvd with its "
        "address");
  }
  {
    MutexLock lock(&mutex_);
    if (ticket_ == access.ticket) return buffer_;
  }
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<const StagedBuffer> buffer,
                          StagedBuffer::Open(access, timeout));
  MutexLock lock(&mutex_);
  ticket_ = access.ticket;
  buffer_ = buffer;
  return buffer;
}

}  // namespace wavekv::client
