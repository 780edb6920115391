#include "daemon/server/insert_stream.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/server/unary_call.h"
#include "daemon/server/wire_requests.h"
#include "proto/rpc/status_conversion.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

absl::Status Stopped(uint64_t messages) {
  return absl::UnavailableError(absl::StrCat("the daemon is shutting down; ", messages,
                                             " messages of this stream were applied"));
}

}  // namespace

InsertStream::InsertStream(ServiceCore* core, grpc::CallbackServerContext* context,
                           v1::InsertReply* reply)
    : core_(core), context_(context), reply_(reply) {}

void InsertStream::Start(absl::StatusOr<CallScope> scope) {
  if (!scope.ok()) return Complete(scope.status());
  caller_ = scope->caller;
  client_ = scope->client();
  if (!core_->streams.Add(this) || !gate_.EndWork([this] { StartRead(&request_); })) {
    Complete(Stopped(0));
  }
}

void InsertStream::OnReadDone(bool ok) {
  if (!ok) {
    if (!gate_.FinishWaiting()) return;
    if (context_->IsCancelled()) return Complete(absl::CancelledError("the stream broke"));
    if (reply_->inserted_messages() == 0) {
      return Complete(absl::InvalidArgumentError("the stream ended before its first message"));
    }
    return Complete(absl::OkStatus());
  }
  if (!gate_.BeginWork()) return;
  const absl::Status queued = core_->step_lane.TrySubmit([this] { Work(); });
  if (!queued.ok()) FinishWith(Overloaded(queued));
}

void InsertStream::Work() {
  if (context_->IsCancelled()) return FinishWith(absl::CancelledError("the stream broke"));
  const absl::Status status = ApplyMessage();
  if (!status.ok()) return FinishWith(status);
  request_.Clear();
  if (!gate_.EndWork([this] { StartRead(&request_); })) {
    Complete(Stopped(reply_->inserted_messages()));
  }
}

void InsertStream::FinishWith(const absl::Status& status) {
  gate_.FinishWork();
  Complete(status);
}

absl::Status InsertStream::ApplyMessage() {
  WAVEKV_ASSIGN_OR_RETURN(const ClientHold hold, core_->registry.Resume(client_));
  WAVEKV_ASSIGN_OR_RETURN(InsertChunk chunk, ParseInsertChunk(request_));
  if (reply_->inserted_messages() == 0 || request_.has_sequence()) {
    WAVEKV_ASSIGN_OR_RETURN(chunk.sequence,
                            ParseSequenceRef(request_.has_sequence(), request_.sequence()));
    if (reply_->inserted_messages() != 0 && chunk.sequence.id != sequence_.id) {
      return absl::InvalidArgumentError(
          absl::StrCat("message ", reply_->inserted_messages(), " of the stream names sequence ",
                       chunk.sequence.id.value(), ", the first named ", sequence_.id.value(),
                       ": one stream inserts into one sequence"));
    }
    sequence_ = chunk.sequence;
  }
  chunk.sequence = sequence_;
  WAVEKV_ASSIGN_OR_RETURN(const InsertOutcome outcome,
                          core_->engine->Insert(caller_.tenant, chunk));
  reply_->set_generation(outcome.generation.value());
  reply_->set_token_count(outcome.token_count);
  reply_->set_inserted_messages(reply_->inserted_messages() + 1);
  return absl::OkStatus();
}

void InsertStream::Stop() {
  if (gate_.Stop()) Complete(Stopped(reply_->inserted_messages()));
}

void InsertStream::Complete(const absl::Status& status) {
  core_->stats.CountCall(Rpc::kInsert, status.code());
  Finish(ToGrpcStatus(status));
}

void InsertStream::OnDone() {
  core_->streams.Remove(this);
  delete this;
}

}  // namespace wavekv
