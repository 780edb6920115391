// Reads a trace file, which may be cut, damaged or made up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/unique_fd.h"
#include "storage/trace/trace_records.h"
#include "storage/trace/trace_state.h"

namespace wavekv {

struct TraceReadOptions {
  // A file without its end is read up to its last whole record.
  bool accept_cut = false;
};

// Not thread-safe. Memory: one record at a time, at most what the file has left.
class TraceReader {
 public:
  // NotFound: no such file. InvalidArgument: not a regular file, not a trace, or of a version that
  // this reader does not know. DataLoss: damaged, or cut before its first record.
  static absl::StatusOr<std::unique_ptr<TraceReader>> Open(
      const std::string& path, const TraceReadOptions& options = TraceReadOptions());
  TraceReader(const TraceReader&) = delete;
  TraceReader& operator=(const TraceReader&) = delete;

  const TraceSequence& sequence() const { return sequence_; }

  // The next record, which fits all before it (TraceState); the end record is the last of a whole
  // file. Nothing: there are no more. DataLoss, naming the byte and the record: a checksum is
  // wrong, records are missing, cannot be or are followed by other bytes, or the file is cut and
  // accept_cut is not set.
  absl::StatusOr<std::optional<TraceRecord>> Next();

  // Of a file that was read to the last: whether its end is missing.
  bool cut() const { return done_ && !state_->ended(); }
  uint64_t file_bytes() const { return file_bytes_; }
  uint64_t bytes_read() const { return offset_; }

 private:
  TraceReader(std::string path, const TraceReadOptions& options, UniqueFd fd, uint64_t file_bytes);

  absl::Status ReadHead();
  absl::Status ReadSequence();
  // The next whole frame's type, its payload in payload_. Nothing: the file ends before it does.
  absl::StatusOr<std::optional<uint32_t>> ReadFrame();
  absl::Status ReadBytes(uint64_t offset, std::span<std::byte> target) const;
  absl::Status Damaged(absl::string_view what) const;
  absl::Status Cut() const;

  const std::string path_;
  const TraceReadOptions options_;
  const UniqueFd fd_;
  const uint64_t file_bytes_;
  uint64_t offset_ = 0;       // Of what was not read yet.
  uint64_t next_number_ = 0;  // Of the record there.
  bool done_ = false;
  std::vector<std::byte> payload_;
  TraceSequence sequence_;
  std::optional<TraceState> state_;  // From the first record on.
};

}  // namespace wavekv
