#include "client/staged_buffer.h"

#include <atomic>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/attend_rows.h"
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

constexpr uint64_t kCopyAlignBytes = 64;

uint64_t Load64(const std::byte* at) {
  return __atomic_load_n(reinterpret_cast<const uint64_t*>(at), __ATOMIC_ACQUIRE);
}

uint32_t Load32(const std::byte* at) {
  return __atomic_load_n(reinterpret_cast<const uint32_t*>(at), __ATOMIC_ACQUIRE);
}

}  // namespace

absl::StatusOr<std::shared_ptr<StagedBuffer>> StagedBuffer::OpenOnHost(
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
  return std::shared_ptr<StagedBuffer>(new StagedBuffer(std::move(mapping)));
}

absl::StatusOr<std::shared_ptr<StagedBuffer>> StagedBuffer::OpenOnDevice(
    const BufferAccess& access, std::chrono::milliseconds timeout) {
  if (access.bytes < kHeaderBytes) {
    return absl::DataLossError(
        absl::StrCat("wave buffer: ", access.bytes, " bytes on ", access.device_uuid));
  }
  WAVEKV_ASSIGN_OR_RETURN(HeldDescriptor held,
                          FetchHeldDescriptor(access.socket, access.ticket, timeout));
  WAVEKV_ASSIGN_OR_RETURN(auto device,
                          DeviceReader::Open(access.device_uuid, std::move(held), access.bytes));
  return std::shared_ptr<StagedBuffer>(new StagedBuffer(std::move(device)));
}

absl::StatusOr<std::shared_ptr<const StagedBuffer>> StagedBuffer::Open(
    const BufferAccess& access, std::chrono::milliseconds timeout) {
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<StagedBuffer> buffer, access.backend == "cuda"
                                                                    ? OpenOnDevice(access, timeout)
                                                                    : OpenOnHost(access, timeout));
  WAVEKV_RETURN_IF_ERROR(buffer->ReadHeader());
  return buffer;
}

absl::StatusOr<const std::byte*> StagedBuffer::View(uint64_t offset, uint64_t bytes,
                                                    std::vector<std::byte>* scratch) const {
  if (in_host_memory()) return mapping_.data() + offset;
  scratch->resize(bytes);
  const DeviceReader::Piece piece{offset, scratch->data(), bytes};
  WAVEKV_RETURN_IF_ERROR(device_->Read({&piece, 1}));
  return scratch->data();
}

bool StagedBuffer::Contains(uint64_t offset, uint64_t bytes) const {
  return offset % sizeof(uint64_t) == 0 && offset <= this->bytes() &&
         bytes <= this->bytes() - offset;
}

absl::Status StagedBuffer::ReadHeader() {
  std::vector<std::byte> scratch;
  WAVEKV_ASSIGN_OR_RETURN(const std::byte* const header, View(0, kHeaderBytes, &scratch));
  const uint64_t magic = Load64(header);
  const uint32_t version = Load32(header + kHeaderVersion);
  directory_entries_ = Load32(header + kHeaderEntries);
  directory_offset_ = Load64(header + kHeaderDirectory);
  if (magic == kBufferMagic && version == kLayoutVersion &&
      Contains(directory_offset_, directory_entries_ * kEntryBytes)) {
    return absl::OkStatus();
  }
  return absl::DataLossError(absl::StrCat("wave buffer: the header has magic ", absl::Hex(magic),
                                          ", version ", version, " and ", directory_entries_,
                                          " entries at ", directory_offset_, "; expected magic ",
                                          absl::Hex(kBufferMagic), ", version ", kLayoutVersion,
                                          " and a directory within ", bytes(), " bytes"));
}

absl::StatusOr<StagedRegion> StagedBuffer::FindStep(uint64_t sequence_id, uint64_t step) const {
  // Rows that the caller has read were read before what is looked at here.
  std::atomic_thread_fence(std::memory_order_acquire);
  std::vector<std::byte> scratch;
  WAVEKV_ASSIGN_OR_RETURN(const std::byte* const header, View(0, kHeaderBytes, &scratch));
  if (Load64(header + kHeaderState) != kStateLive) {
    return absl::NotFoundError("wave buffer: closed by the daemon");
  }
  WAVEKV_ASSIGN_OR_RETURN(const std::byte* const directory,
                          View(directory_offset_, directory_entries_ * kEntryBytes, &scratch));
  for (uint32_t i = 0; i < directory_entries_; ++i) {
    const std::byte* const entry = directory + i * kEntryBytes;
    if (Load64(entry) != sequence_id) continue;
    const StagedRegion region{.offset = Load64(entry + kEntryRegionOffset),
                              .bytes = Load64(entry + kEntryRegionBytes)};
    if (region.bytes >= kRegionBytesMin && Contains(region.offset, region.bytes)) {
      WAVEKV_ASSIGN_OR_RETURN(const std::byte* const found,
                              View(region.offset, kRegionBytesMin, &scratch));
      if (Load64(found) == kRegionMagic) {
        const uint64_t ready = Load64(found + kRegionStep);
        if (Load64(found + kRegionSequence) != sequence_id || ready < step) break;
        return region;
      }
    }
    return absl::DataLossError(
        absl::StrCat("wave buffer: sequence ", sequence_id, " has ", region.bytes, " bytes at ",
                     region.offset, ", which is no region of a buffer of ", bytes(), " bytes"));
  }
  return absl::NotFoundError(absl::StrCat("wave buffer: step ", step, " of sequence ", sequence_id,
                                          " is not here; was it given back, or wavebufferd "
                                          "restarted?"));
}

absl::StatusOr<StepCopy> StagedBuffer::CopyStep(const StagedRegion& region, const ModelShape& shape,
                                                const QueryResult& query) const {
  StepCopy copy{.query = query};
  std::vector<DeviceReader::Piece> pieces;
  uint64_t used = 0;
  const auto add = [&](uint64_t* offset, uint64_t bytes) {
    if (bytes == 0) return;
    pieces.push_back({*offset, nullptr, bytes});
    *offset = used;
    used = (used + bytes + kCopyAlignBytes - 1) / kCopyAlignBytes * kCopyAlignBytes;
  };
  for (HeadZones& head : copy.query.heads) {
    WAVEKV_RETURN_IF_ERROR(CheckRows(region, shape, head.staged));
    for (StagedRows& rows : head.staged) {
      add(&rows.key_offset, rows.row_count * shape.key_bytes());
      add(&rows.value_offset, rows.row_count * shape.value_bytes());
    }
  }
  // They lie in the region by the same alignment, side by side.
  if (used > region.bytes) {
    return absl::InternalError(absl::StrCat("the daemon staged rows of ", used,
                                            " bytes in a region of ", region.bytes,
                                            ": some of them twice"));
  }
  copy.bytes.resize(used);
  copy.region = {.offset = 0, .bytes = used};
  uint64_t at = 0;
  for (DeviceReader::Piece& piece : pieces) {
    piece.target = copy.bytes.data() + at;
    at = (at + piece.bytes + kCopyAlignBytes - 1) / kCopyAlignBytes * kCopyAlignBytes;
  }
  WAVEKV_RETURN_IF_ERROR(device_->Read(pieces));
  return copy;
}

absl::StatusOr<std::shared_ptr<const StagedBuffer>> StagedBufferCache::Get(
    const BufferAccess& access, std::chrono::milliseconds timeout) {
  if (access.ticket.empty()) {
    return absl::FailedPreconditionError(
        "the daemon has no wave buffer: start wavebufferd, and wavekvd with its "
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
