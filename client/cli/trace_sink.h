// From a daemon's recording into a trace file.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "storage/trace/trace_records.h"
#include "storage/trace/trace_writer.h"

namespace wavekv::client {

// Not thread-safe. Nothing that the daemon sends is written unseen: every record is checked as a
// reader of the file would.
class TraceSink {
 public:
  explicit TraceSink(std::string path) : path_(std::move(path)) {}

  // Whole records in order. Internal: they are not those of a trace. Otherwise TraceWriter's
  // errors.
  absl::Status Take(std::string_view records);
  // Ends a file whose end the daemon has not sent. FailedPrecondition: what was stored has not all
  // come; the file stays cut.
  absl::Status Stop();

  // Null before the first record.
  const TraceWriter* writer() const { return writer_.get(); }
  // Unset: the file has no end yet.
  const std::optional<TraceEndReason>& end() const { return end_; }

 private:
  absl::Status TakeOne(uint32_t type, std::span<const std::byte> payload);

  const std::string path_;
  std::unique_ptr<TraceWriter> writer_;
  uint64_t next_number_ = 0;
  std::optional<TraceEndReason> end_;
};

}  // namespace wavekv::client
