// The Decode stream: one Attend per message, one answer outstanding.
#pragma once

#include "daemon/server/call_guard.h"
#include "daemon/server/service_core.h"
#include "grpcpp/support/server_callback.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv {

// Deletes itself when gRPC is done with it. The next request is read once the answer before it
// has left, so that a client that does not read costs one answer.
class DecodeStream final : public grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendReply>,
                           public StoppableStream {
 public:
  DecodeStream(ServiceCore* core, grpc::CallbackServerContext* context);

  void Start(absl::StatusOr<CallScope> scope);
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;
  void Stop() override;

 private:
  ~DecodeStream() override = default;
  void Work();
  absl::Status Answer();
  // Out of the work on a message.
  void FinishWith(const absl::Status& status);
  // Of whoever the gate has told to.
  void Complete(const absl::Status& status);

  ServiceCore* const core_;
  const CallTracker::Token token_{&core_->calls};
  grpc::CallbackServerContext* const context_;
  v1::AttendRequest request_;
  v1::AttendReply reply_;
  Caller caller_;
  ClientId client_;
  double read_us_ = 0;
  StreamGate gate_;
};

}  // namespace wavekv
