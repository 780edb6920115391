#include "storage/trace/trace_writer.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "storage/trace/trace_layout.h"

namespace wavekv {
namespace {

absl::Status FileError(const std::string& path, const char* what) {
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": ", what));
}

absl::Status ExistsError(const std::string& path) {
  return absl::AlreadyExistsError(
      absl::StrCat(path, " is there already; remove it or choose another name"));
}

// Makes the new name of a file last.
absl::Status SyncDirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const UniqueFd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid() || ::fsync(fd.get()) != 0) return FileError(directory, "cannot be synced");
  return absl::OkStatus();
}

}  // namespace

std::string PartialTracePath(const std::string& path) { return path + ".partial"; }

absl::StatusOr<std::unique_ptr<TraceWriter>> TraceWriter::Create(std::string path,
                                                                 TraceSequence sequence) {
  WAVEKV_RETURN_IF_ERROR(ValidateTraceSequence(sequence));
  if (::access(path.c_str(), F_OK) == 0) return ExistsError(path);
  const std::string partial = PartialTracePath(path);
  UniqueFd fd(::open(partial.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!fd.valid()) return FileError(partial, "cannot be made");
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    return absl::AlreadyExistsError(
        absl::StrCat(partial, " is being written by another recording; choose another name"));
  }
  if (::ftruncate(fd.get(), 0) != 0) return FileError(partial, "cannot be emptied");
  std::unique_ptr<TraceWriter> writer(
      new TraceWriter(std::move(path), std::move(sequence), std::move(fd)));
  const TraceFileHead head;
  WAVEKV_RETURN_IF_ERROR(writer->Append(std::as_bytes(std::span(&head, 1))));
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<std::byte> first, EncodeTrace(writer->sequence_));
  WAVEKV_RETURN_IF_ERROR(writer->Append(first));
  return writer;
}

TraceWriter::TraceWriter(std::string path, TraceSequence sequence, UniqueFd fd)
    : path_(std::move(path)),
      sequence_(std::move(sequence)),
      state_(sequence_),
      fd_(std::move(fd)) {}

absl::Status TraceWriter::Append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_.get(), bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return FileError(PartialTracePath(path_), "cannot be written");
    bytes = bytes.subspan(static_cast<size_t>(written));
    bytes_written_ += static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

absl::Status TraceWriter::AppendRecord(const TraceRecord& record) {
  WAVEKV_RETURN_IF_ERROR(state_.Admit(record));
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, EncodeTrace(record, next_number_));
  ++next_number_;
  return Append(bytes);
}

absl::Status TraceWriter::Write(const TraceRecord& record) {
  if (std::holds_alternative<TraceEnd>(record)) {
    return absl::InvalidArgumentError("an end record; Finish writes it");
  }
  return AppendRecord(record);
}

absl::Status TraceWriter::Finish(TraceEndReason reason) {
  WAVEKV_RETURN_IF_ERROR(AppendRecord(TraceEnd{reason, state_.step_count()}));
  const std::string partial = PartialTracePath(path_);
  if (::fsync(fd_.get()) != 0) return FileError(partial, "cannot be synced");
  if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE) != 0) {
    // A file system that does not know the flag: the name was free at the start.
    if (errno == EEXIST) return ExistsError(path_);
    if (errno != EINVAL || ::rename(partial.c_str(), path_.c_str()) != 0) {
      return FileError(partial, "cannot be renamed");
    }
  }
  return SyncDirectoryOf(path_);
}

}  // namespace wavekv
