#include "client/cli/trace_sink.h"

#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "storage/trace/trace_layout.h"

namespace wavekv::client {
namespace {

absl::Status Malformed(const absl::Status& why) {
  return absl::InternalError(absl::StrCat("the daemon's recording is malformed: ", why.message()));
}

}  // namespace

absl::Status TraceSink::Take(std::string_view records) {
  auto bytes = std::as_bytes(std::span(records.data(), records.size()));
  while (!bytes.empty()) {
    const absl::StatusOr<TraceFramed> record = TakeTraceRecord(&bytes, next_number_);
    if (!record.ok()) return Malformed(record.status());
    WAVEKV_RETURN_IF_ERROR(TakeOne(record->type, record->payload));
    ++next_number_;
  }
  return absl::OkStatus();
}

absl::Status TraceSink::TakeOne(uint32_t type, std::span<const std::byte> payload) {
  if (writer_ == nullptr) {
    if (type != static_cast<uint32_t>(TraceType::kSequence)) {
      return Malformed(absl::InvalidArgumentError("it does not begin with the sequence"));
    }
    absl::StatusOr<TraceSequence> sequence = DecodeTraceSequence(payload);
    if (!sequence.ok()) return Malformed(sequence.status());
    WAVEKV_ASSIGN_OR_RETURN(writer_, TraceWriter::Create(path_, *std::move(sequence)));
    return absl::OkStatus();
  }
  const absl::StatusOr<TraceRecord> record = DecodeTrace(type, writer_->sequence().shape, payload);
  if (!record.ok()) return Malformed(record.status());
  if (end_.has_value()) return Malformed(absl::InvalidArgumentError("it goes on after its end"));
  const auto* const end = std::get_if<TraceEnd>(&*record);
  if (end == nullptr) {
    const absl::Status written = writer_->Write(*record);
    return absl::IsInvalidArgument(written) ? Malformed(written) : written;
  }
  if (end->step_count != writer_->step_count()) {
    return Malformed(absl::InvalidArgumentError(absl::StrCat(
        "it counts ", end->step_count, " steps, ", writer_->step_count(), " have come")));
  }
  WAVEKV_RETURN_IF_ERROR(writer_->Finish(end->reason));
  end_ = end->reason;
  return absl::OkStatus();
}

absl::Status TraceSink::Stop() {
  if (end_.has_value()) return absl::OkStatus();
  if (writer_ == nullptr) {
    return absl::FailedPreconditionError("stopped before anything had come; there is no file");
  }
  const absl::Status finished = writer_->Finish(TraceEndReason::kStopped);
  if (absl::IsInvalidArgument(finished)) {
    return absl::FailedPreconditionError(
        absl::StrCat("stopped before all that was stored had come (", finished.message(),
                     "); what has come is in ", PartialTracePath(path_), ", cut"));
  }
  WAVEKV_RETURN_IF_ERROR(finished);
  end_ = TraceEndReason::kStopped;
  return absl::OkStatus();
}

}  // namespace wavekv::client
