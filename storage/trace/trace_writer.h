// Writes a trace file.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/unique_fd.h"
#include "storage/trace/trace_records.h"
#include "storage/trace/trace_state.h"

namespace wavekv {

// The name that `path` has until it is whole.
std::string PartialTracePath(const std::string& path);

// Not thread-safe. The file has its name only once it is whole: until Finish it is
// PartialTracePath(path), and stays there, cut, if Finish never comes.
class TraceWriter {
 public:
  // AlreadyExists: `path` is there, or another writer is at work on it. A cut file of an earlier
  // one is written over.
  static absl::StatusOr<std::unique_ptr<TraceWriter>> Create(std::string path,
                                                             TraceSequence sequence);
  TraceWriter(const TraceWriter&) = delete;
  TraceWriter& operator=(const TraceWriter&) = delete;

  // Anything but an end. InvalidArgument: it does not fit what came before; nothing was written.
  absl::Status Write(const TraceRecord& record);
  // The end, with this writer's count of steps; then the file is on disk and has its name. Nothing
  // may follow. InvalidArgument: rows that were stored are still missing.
  absl::Status Finish(TraceEndReason reason);

  const TraceSequence& sequence() const { return sequence_; }
  uint64_t step_count() const { return state_.step_count(); }
  uint64_t bytes_written() const { return bytes_written_; }

 private:
  TraceWriter(std::string path, TraceSequence sequence, UniqueFd fd);

  absl::Status Append(std::span<const std::byte> bytes);
  absl::Status AppendRecord(const TraceRecord& record);

  const std::string path_;
  const TraceSequence sequence_;
  TraceState state_;
  UniqueFd fd_;
  uint64_t next_number_ = 1;
  uint64_t bytes_written_ = 0;
};

}  // namespace wavekv
