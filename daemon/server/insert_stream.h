// The Insert stream: one message at a time, each applied whole before the next is read.
#pragma once

#include "daemon/server/call_guard.h"
#include "daemon/server/service_core.h"
#include "grpcpp/support/server_callback.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv {

// Deletes itself when gRPC is done with it. A stream that breaks leaves what was applied.
class InsertStream final : public grpc::ServerReadReactor<v1::InsertRequest>,
                           public StoppableStream {
 public:
  InsertStream(ServiceCore* core, grpc::CallbackServerContext* context, v1::InsertReply* reply);

  void Start(absl::StatusOr<CallScope> scope);
  void OnReadDone(bool ok) override;
  void OnDone() override;
  void Stop() override;

 private:
  ~InsertStream() override = default;
  void Work();
  absl::Status ApplyMessage();
  // Out of the work on a message.
  void FinishWith(const absl::Status& status);
  // Of whoever the gate has told to.
  void Complete(const absl::Status& status);

  ServiceCore* const core_;
  const CallTracker::Token token_{&core_->calls};
  grpc::CallbackServerContext* const context_;
  v1::InsertReply* const reply_;
  v1::InsertRequest request_;
  Caller caller_;
  ClientId client_;
  SequenceRef sequence_;  // Of the first message.
  StreamGate gate_;
};

}  // namespace wavekv
