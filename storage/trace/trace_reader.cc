#include "storage/trace/trace_reader.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"
#include "storage/trace/trace_layout.h"

namespace wavekv {

absl::StatusOr<std::unique_ptr<TraceReader>> TraceReader::Open(const std::string& path,
                                                               const TraceReadOptions& options) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, absl::StrCat(path, " cannot be opened"));
  struct stat status;
  if (::fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " is no regular file, which a trace must be"));
  }
  std::unique_ptr<TraceReader> reader(
      new TraceReader(path, options, std::move(fd), static_cast<uint64_t>(status.st_size)));
  WAVEKV_RETURN_IF_ERROR(reader->ReadHead());
  WAVEKV_RETURN_IF_ERROR(reader->ReadSequence());
  return reader;
}

TraceReader::TraceReader(std::string path, const TraceReadOptions& options, UniqueFd fd,
                         uint64_t file_bytes)
    : path_(std::move(path)), options_(options), fd_(std::move(fd)), file_bytes_(file_bytes) {}

absl::Status TraceReader::ReadBytes(uint64_t offset, std::span<std::byte> target) const {
  while (!target.empty()) {
    const ssize_t count =
        ::pread(fd_.get(), target.data(), target.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::ErrnoToStatus(errno, absl::StrCat(path_, " cannot be read"));
    if (count == 0) {
      return absl::DataLossError(absl::StrCat(path_, " became shorter while it was read"));
    }
    target = target.subspan(static_cast<size_t>(count));
    offset += static_cast<uint64_t>(count);
  }
  return absl::OkStatus();
}

absl::Status TraceReader::Damaged(absl::string_view what) const {
  return absl::DataLossError(
      absl::StrCat(path_, ": record ", next_number_, ", at byte ", offset_, ": ", what));
}

absl::Status TraceReader::Cut() const {
  return absl::DataLossError(absl::StrCat(path_, " is cut: it ends at byte ", file_bytes_,
                                          ", in or before record ", next_number_,
                                          ", without an end record; the recording broke off"));
}

absl::Status TraceReader::ReadHead() {
  TraceFileHead head;
  head.magic = {};
  if (file_bytes_ >= sizeof head) {
    WAVEKV_RETURN_IF_ERROR(ReadBytes(0, std::as_writable_bytes(std::span(&head, 1))));
  }
  if (head.magic != kTraceMagic) {
    return absl::InvalidArgumentError(absl::StrCat(path_, " is no trace file of wavekv record"));
  }
  if (head.version != kTraceVersion || head.zero != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, " is a trace of format version ", head.version, ", expected version ",
                     kTraceVersion, "; read it with the wavekv that recorded it"));
  }
  offset_ = sizeof head;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<uint32_t>> TraceReader::ReadFrame() {
  TraceFrame frame;
  if (file_bytes_ - offset_ < sizeof frame) return std::optional<uint32_t>();
  WAVEKV_RETURN_IF_ERROR(ReadBytes(offset_, std::as_writable_bytes(std::span(&frame, 1))));
  const absl::Status judged = CheckTraceFrame(frame, next_number_);
  if (!judged.ok()) return Damaged(judged.message());
  const uint64_t payload_at = offset_ + sizeof frame;
  if (file_bytes_ - payload_at < frame.payload_bytes) return std::optional<uint32_t>();
  payload_.resize(frame.payload_bytes);
  WAVEKV_RETURN_IF_ERROR(ReadBytes(payload_at, payload_));
  if (Crc32c(payload_) != frame.payload_crc) return Damaged("its checksum is wrong");
  return std::optional<uint32_t>(frame.type);
}

absl::Status TraceReader::ReadSequence() {
  WAVEKV_ASSIGN_OR_RETURN(const std::optional<uint32_t> type, ReadFrame());
  if (!type.has_value()) return Cut();
  if (*type != static_cast<uint32_t>(TraceType::kSequence)) {
    return Damaged(absl::StrCat("it has the type ", *type, ", expected the sequence"));
  }
  absl::StatusOr<TraceSequence> sequence = DecodeTraceSequence(payload_);
  const absl::Status judged = sequence.ok() ? ValidateTraceSequence(*sequence) : sequence.status();
  if (!judged.ok()) return Damaged(judged.message());
  sequence_ = *std::move(sequence);
  state_.emplace(sequence_);
  offset_ += sizeof(TraceFrame) + payload_.size();
  ++next_number_;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<TraceRecord>> TraceReader::Next() {
  if (done_) return std::optional<TraceRecord>();
  WAVEKV_ASSIGN_OR_RETURN(const std::optional<uint32_t> type, ReadFrame());
  if (!type.has_value()) {
    if (!options_.accept_cut) return Cut();
    done_ = true;
    return std::optional<TraceRecord>();
  }
  absl::StatusOr<TraceRecord> record = DecodeTrace(*type, sequence_.shape, payload_);
  const absl::Status judged = record.ok() ? state_->Admit(*record) : record.status();
  if (!judged.ok()) return Damaged(judged.message());
  offset_ += sizeof(TraceFrame) + payload_.size();
  ++next_number_;
  if (state_->ended()) {
    if (offset_ != file_bytes_) {
      return Damaged(absl::StrCat(file_bytes_ - offset_, " bytes follow the end record"));
    }
    done_ = true;
  }
  return std::optional<TraceRecord>(*std::move(record));
}

}  // namespace wavekv
