#include "daemon/server/decode_stream.h"

#include <utility>

#include "daemon/server/handlers.h"
#include "daemon/server/unary_call.h"
#include "proto/rpc/status_conversion.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

absl::Status Stopped() { return absl::UnavailableError("the daemon is shutting down"); }

}  // namespace

DecodeStream::DecodeStream(ServiceCore* core, grpc::CallbackServerContext* context)
    : core_(core), context_(context) {}

void DecodeStream::Start(absl::StatusOr<CallScope> scope) {
  if (!scope.ok()) return Complete(scope.status());
  caller_ = scope->caller;
  client_ = scope->client();
  if (!core_->streams.Add(this) || !gate_.EndWork([this] { StartRead(&request_); })) {
    Complete(Stopped());
  }
}

void DecodeStream::OnReadDone(bool ok) {
  if (!ok) {
    if (!gate_.FinishWaiting()) return;
    return Complete(context_->IsCancelled() ? absl::CancelledError("the stream broke")
                                            : absl::OkStatus());
  }
  if (!gate_.BeginWork()) return;
  read_us_ = NowUs();
  const absl::Status queued = core_->step_lane.TrySubmit([this] { Work(); });
  if (!queued.ok()) FinishWith(Overloaded(queued));
}

void DecodeStream::Work() {
  if (context_->IsCancelled()) return FinishWith(absl::CancelledError("the stream broke"));
  const absl::Status status = Answer();
  core_->stats.RecordLatency(Rpc::kDecode, NowUs() - read_us_);
  // The gate stays at work until the answer has left.
  if (status.ok()) return StartWrite(&reply_);
  FinishWith(status);
}

void DecodeStream::FinishWith(const absl::Status& status) {
  gate_.FinishWork();
  Complete(status);
}

absl::Status DecodeStream::Answer() {
  CallScope scope{.caller = caller_, .hold = {}};
  WAVEKV_ASSIGN_OR_RETURN(scope.hold, core_->registry.Resume(client_));
  reply_.Clear();
  WAVEKV_RETURN_IF_ERROR(HandleAttend(*core_, scope, request_, &reply_));
  return CheckReplyBytes(reply_.ByteSizeLong(), core_->options);
}

void DecodeStream::OnWriteDone(bool ok) {
  if (!ok) return FinishWith(absl::CancelledError("the stream broke"));
  request_.Clear();
  if (!gate_.EndWork([this] { StartRead(&request_); })) Complete(Stopped());
}

void DecodeStream::Stop() {
  if (gate_.Stop()) Complete(Stopped());
}

void DecodeStream::Complete(const absl::Status& status) {
  core_->stats.CountCall(Rpc::kDecode, status.code());
  Finish(ToGrpcStatus(status));
}

void DecodeStream::OnDone() {
  core_->streams.Remove(this);
  delete this;
}

}  // namespace wavekv
