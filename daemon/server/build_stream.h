// The BuildIndex stream: progress until the build is done.
#pragma once

#include <optional>

#include "daemon/server/call_guard.h"
#include "daemon/server/service_core.h"
#include "grpcpp/support/server_callback.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv {

// Deletes itself when gRPC is done with it. A client that goes stops the waiting; the build itself
// goes on. Progress is told as fast as the client reads: a newer one replaces one that waits.
class BuildStream final : public grpc::ServerWriteReactor<v1::BuildIndexProgress> {
 public:
  BuildStream(ServiceCore* core, grpc::CallbackServerContext* context,
              const v1::BuildIndexRequest* request);

  void Start(absl::StatusOr<CallScope> scope);
  void OnWriteDone(bool ok) override;
  void OnDone() override { delete this; }

 private:
  ~BuildStream() override = default;
  void Work();
  absl::Status Build();
  // Takes the newest progress to the client; false when nobody wants it any more.
  bool Tell(const BuildProgress& progress);
  void End(const absl::Status& status);
  void Complete(const absl::Status& status);

  ServiceCore* const core_;
  const CallTracker::Token token_{&core_->calls};
  grpc::CallbackServerContext* const context_;
  const v1::BuildIndexRequest* const request_;
  std::optional<CallScope> scope_;
  v1::BuildIndexProgress writing_;  // Belongs to gRPC while is_writing_.

  Mutex mutex_;
  bool is_writing_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<v1::BuildIndexProgress> waiting_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv
