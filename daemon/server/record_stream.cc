#include "daemon/server/record_stream.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "daemon/server/unary_call.h"
#include "daemon/server/wire_requests.h"
#include "proto/rpc/status_conversion.h"
#include "storage/base/status_macros.h"
#include "storage/trace/trace_layout.h"

namespace wavekv {
namespace {

// Small records go together up to here; a message costs about as much as so many bytes.
constexpr size_t kMessageBytes = 256 << 10;

absl::Status Broken() { return absl::CancelledError("cancelled by the client"); }

void Append(const std::vector<std::byte>& bytes, v1::RecordSequenceReply* message) {
  message->mutable_records()->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

}  // namespace

RecordStream::RecordStream(ServiceCore* core, grpc::CallbackServerContext* context,
                           const v1::RecordSequenceRequest* request)
    : core_(core), context_(context), request_(request) {}

void RecordStream::Start(absl::StatusOr<CallScope> scope) {
  if (!scope.ok()) return Complete(scope.status());
  // The client's lease is its heartbeat's matter: the recording goes on for as long as the call.
  scope_ = CallScope{.caller = scope->caller, .hold = {}};
  if (!core_->streams.Add(this)) {
    return Complete(absl::UnavailableError("the daemon is shutting down"));
  }
  const absl::Status queued = core_->record_lane.TrySubmit([this] { Work(); });
  if (!queued.ok()) Complete(Overloaded(queued));
}

void RecordStream::Work() {
  const absl::Status status = Record();
  {
    MutexLock lock(&mutex_);
    recorder_.reset();
  }
  Complete(status);
}

absl::Status RecordStream::Record() {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request_->has_sequence(), request_->sequence()));
  RecordingOptions options;
  options.layers.assign(request_->layers().begin(), request_->layers().end());
  options.steps = request_->steps();
  options.rows_bytes_max =
      std::min<uint64_t>(kTraceRowsBytes, core_->options.message_bytes_max / 2);
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<Recorder> recorder,
                          core_->engine->Record(scope_->caller.tenant, sequence, options));
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<std::byte> first, EncodeTrace(recorder->sequence()));
  Adopt(std::move(recorder));
  Append(first, &message_);
  for (bool ended = false; !ended;) {
    WAVEKV_RETURN_IF_ERROR(Send());
    message_.Clear();
    WAVEKV_ASSIGN_OR_RETURN(ended, Fill(&message_));
  }
  return Send();
}

absl::StatusOr<bool> RecordStream::Fill(v1::RecordSequenceReply* message) {
  Recorder* recorder = nullptr;
  {
    MutexLock lock(&mutex_);
    recorder = recorder_.get();
  }
  do {
    WAVEKV_ASSIGN_OR_RETURN(const TraceRecord record, recorder->Next());
    WAVEKV_ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, EncodeTrace(record, next_number_));
    ++next_number_;
    Append(bytes, message);
    if (std::holds_alternative<TraceEnd>(record)) return true;
  } while (message->records().size() < kMessageBytes && recorder->ready());
  return false;
}

absl::Status RecordStream::Send() {
  WAVEKV_RETURN_IF_ERROR(CheckReplyBytes(message_.ByteSizeLong(), core_->options));
  {
    MutexLock lock(&mutex_);
    if (broken_) return Broken();
    is_writing_ = true;
  }
  StartWrite(&message_);
  MutexLock lock(&mutex_);
  while (is_writing_) written_.Wait(&mutex_);
  return broken_ ? Broken() : absl::OkStatus();
}

void RecordStream::OnWriteDone(bool ok) {
  MutexLock lock(&mutex_);
  is_writing_ = false;
  broken_ = broken_ || !ok;
  written_.NotifyAll();
}

void RecordStream::Adopt(std::unique_ptr<Recorder> recorder) {
  MutexLock lock(&mutex_);
  recorder_ = std::move(recorder);
  if (stopped_) recorder_->Finish(TraceEndReason::kDaemonStopped);
  if (broken_) recorder_->Cancel();
}

void RecordStream::OnCancel() {
  MutexLock lock(&mutex_);
  broken_ = true;
  if (recorder_ != nullptr) recorder_->Cancel();
}

void RecordStream::Stop() {
  MutexLock lock(&mutex_);
  stopped_ = true;
  if (recorder_ != nullptr) recorder_->Finish(TraceEndReason::kDaemonStopped);
}

void RecordStream::Complete(const absl::Status& status) {
  scope_.reset();
  core_->stats.CountCall(Rpc::kRecordSequence, status.code());
  Finish(ToGrpcStatus(status));
}

void RecordStream::OnDone() {
  core_->streams.Remove(this);
  delete this;
}

}  // namespace wavekv
