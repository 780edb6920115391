// The one way a unary RPC goes: known in gRPC's thread, worked on in a lane's, answered once.
#pragma once

#include <optional>
#include <utility>

#include "daemon/server/call_guard.h"
#include "daemon/server/service_core.h"
#include "grpcpp/support/server_callback.h"
#include "proto/rpc/status_conversion.h"

namespace wavekv {

// Microseconds of CLOCK_MONOTONIC.
double NowUs();

// Our refusal of a reply that no client would accept.
absl::Status CheckReplyBytes(size_t bytes, const ServerOptions& options);

// Of a full queue, `queued` being its answer.
absl::Status Overloaded(const absl::Status& queued);

// Deletes itself when gRPC is done with it.
template <class Request, class Reply>
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  using Handler = absl::Status (*)(ServiceCore&, const CallScope&, const Request&, Reply*);

  // All pointers live until gRPC is done with the call.
  UnaryCall(ServiceCore* core, Rpc rpc, grpc::CallbackServerContext* context,
            const Request* request, Reply* reply, Handler handler)
      : core_(core),
        rpc_(rpc),
        context_(context),
        request_(request),
        reply_(reply),
        handler_(handler),
        start_us_(NowUs()) {}

  void Start(absl::StatusOr<CallScope> scope, Lane lane) {
    if (!scope.ok()) return Complete(scope.status());
    scope_ = *std::move(scope);
    if (lane == Lane::kInline) return Work();
    const absl::Status queued = core_->lane(lane)->TrySubmit([this] { Work(); });
    if (!queued.ok()) Complete(Overloaded(queued));
  }

  void OnDone() override { delete this; }

 private:
  ~UnaryCall() override = default;

  void Work() {
    // Cancelled, out of time or of a dead client while it waited: nobody would hear the answer.
    if (context_->IsCancelled()) return Complete(absl::CancelledError("cancelled by the client"));
    absl::Status status = handler_(*core_, *scope_, *request_, reply_);
    if (status.ok()) status = CheckReplyBytes(reply_->ByteSizeLong(), core_->options);
    Complete(status);
  }

  void Complete(const absl::Status& status) {
    scope_.reset();
    core_->stats.CountCall(rpc_, status.code());
    core_->stats.RecordLatency(rpc_, NowUs() - start_us_);
    Finish(ToGrpcStatus(status));
  }

  ServiceCore* const core_;
  const CallTracker::Token token_{&core_->calls};
  const Rpc rpc_;
  grpc::CallbackServerContext* const context_;
  const Request* const request_;
  Reply* const reply_;
  const Handler handler_;
  const double start_us_;
  std::optional<CallScope> scope_;
};

}  // namespace wavekv
