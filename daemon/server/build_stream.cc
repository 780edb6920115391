#include "daemon/server/build_stream.h"

#include <utility>

#include "daemon/server/unary_call.h"
#include "daemon/server/wire_requests.h"
#include "proto/rpc/status_conversion.h"
#include "storage/base/status_macros.h"

namespace wavekv {

BuildStream::BuildStream(ServiceCore* core, grpc::CallbackServerContext* context,
                         const v1::BuildIndexRequest* request)
    : core_(core), context_(context), request_(request) {}

void BuildStream::Start(absl::StatusOr<CallScope> scope) {
  if (!scope.ok()) return Complete(scope.status());
  scope_ = *std::move(scope);
  const absl::Status queued = core_->build_lane.TrySubmit([this] { Work(); });
  if (!queued.ok()) Complete(Overloaded(queued));
}

void BuildStream::Work() {
  if (context_->IsCancelled()) return Complete(absl::CancelledError("cancelled by the client"));
  End(Build());
}

absl::Status BuildStream::Build() {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request_->has_sequence(), request_->sequence()));
  const absl::StatusOr<BuildProgress> built =
      core_->engine->BuildIndex(scope_->caller.tenant, sequence,
                                [this](const BuildProgress& progress) { return Tell(progress); });
  if (!built.ok()) {
    const bool stopping = absl::IsCancelled(built.status()) && core_->stopping.load();
    return stopping ? absl::UnavailableError("the daemon is shutting down") : built.status();
  }
  BuildProgress done = *built;
  done.done = true;
  Tell(done);
  return absl::OkStatus();
}

bool BuildStream::Tell(const BuildProgress& progress) {
  v1::BuildIndexProgress message;
  message.set_tokens_done(progress.tokens_done);
  message.set_tokens_total(progress.tokens_total);
  message.set_done(progress.done);
  message.set_generation(progress.generation.value());
  message.set_version(progress.version);
  bool write = false;
  {
    MutexLock lock(&mutex_);
    if (is_writing_) {
      waiting_ = std::move(message);
    } else {
      writing_ = std::move(message);
      write = is_writing_ = true;
    }
  }
  if (write) StartWrite(&writing_);
  return !context_->IsCancelled() && !core_->stopping.load();
}

void BuildStream::OnWriteDone(bool ok) {
  std::optional<absl::Status> ended;
  bool write = false;
  {
    MutexLock lock(&mutex_);
    write = ok && waiting_.has_value();
    if (write) {
      writing_ = *std::exchange(waiting_, std::nullopt);
    } else {
      is_writing_ = false;
      ended = ended_;
    }
  }
  if (write) {
    StartWrite(&writing_);
  } else if (ended.has_value()) {
    Complete(*ended);
  }
}

void BuildStream::End(const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    ended_ = status;
    if (is_writing_) return;  // OnWriteDone completes.
  }
  Complete(status);
}

void BuildStream::Complete(const absl::Status& status) {
  scope_.reset();
  core_->stats.CountCall(Rpc::kBuildIndex, status.code());
  Finish(ToGrpcStatus(status));
}

}  // namespace wavekv
