// The RecordSequence stream: a trace of a sequence, record by record.
#pragma once

#include <memory>
#include <optional>

#include "daemon/engine/recorder.h"
#include "daemon/server/call_guard.h"
#include "daemon/server/service_core.h"
#include "grpcpp/support/server_callback.h"
#include "storage/base/mutex.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv {

// Deletes itself when gRPC is done with it. A thread of the recording lane takes records and waits
// for the client to take them; steps wait for neither.
class RecordStream final : public grpc::ServerWriteReactor<v1::RecordSequenceReply>,
                           public StoppableStream {
 public:
  RecordStream(ServiceCore* core, grpc::CallbackServerContext* context,
               const v1::RecordSequenceRequest* request);

  void Start(absl::StatusOr<CallScope> scope);
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  // The daemon shuts down: the trace ends with what has happened.
  void Stop() override;
  void OnDone() override;

 private:
  ~RecordStream() override = default;
  void Work();
  // The whole recording, in the lane's thread.
  absl::Status Record();
  // Adds records to the message while there are some, up to its size; true with the last one.
  absl::StatusOr<bool> Fill(v1::RecordSequenceReply* message);
  // Sends one message and waits until it has left.
  absl::Status Send();
  // Makes the recorder known to OnCancel and Stop, which may have come already.
  void Adopt(std::unique_ptr<Recorder> recorder);
  void Complete(const absl::Status& status);

  ServiceCore* const core_;
  const CallTracker::Token token_{&core_->calls};
  grpc::CallbackServerContext* const context_;
  const v1::RecordSequenceRequest* const request_;
  std::optional<CallScope> scope_;
  v1::RecordSequenceReply message_;  // Belongs to gRPC while it is written.
  uint64_t next_number_ = 1;         // Of the record that comes next; the sequence has 0.

  Mutex mutex_;
  CondVar written_;
  std::unique_ptr<Recorder> recorder_ ABSL_GUARDED_BY(mutex_);
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace wavekv
