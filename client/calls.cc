#include "client/calls.h"

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {

absl::Status RunAttend(Connection& connection, uint64_t epoch, const v1::AttendRequest& request,
                       v1::AttendReply* reply) {
  WAVEKV_RETURN_IF_ERROR(
      connection.Run({.name = "Attend", .deadline = connection.options().deadline, .epoch = epoch},
                     [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
                       return stub.Attend(context, request, reply);
                     }));
  if (reply->results_size() == request.items_size()) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("the daemon's reply is malformed: ", reply->results_size(), " results for ",
                   request.items_size(), " items"));
}

absl::StatusOr<BuildResult> RunBuild(Connection& connection, uint64_t epoch,
                                     const v1::BuildIndexRequest& request,
                                     const std::function<void(const BuildProgress&)>& progress) {
  v1::BuildIndexProgress last;
  WAVEKV_RETURN_IF_ERROR(connection.Run(
      {.name = "BuildIndex", .deadline = connection.options().build_deadline, .epoch = epoch},
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        last.Clear();
        const auto reader = stub.BuildIndex(context, request);
        while (reader->Read(&last)) {
          if (progress == nullptr) continue;
          progress({.tokens_done = last.tokens_done(),
                    .tokens_total = last.tokens_total(),
                    .done = last.done()});
        }
        return reader->Finish();
      }));
  const v1::SequenceRef& sequence = request.sequence();
  if (!last.done() || last.generation() != sequence.generation()) {
    return absl::InternalError(
        absl::StrCat("the daemon ended the build of sequence ", sequence.sequence_id(),
                     " in generation ", last.generation(), last.done() ? "" : " before it was done",
                     "; asked was generation ", sequence.generation()));
  }
  return BuildResult{.generation = last.generation(), .version = last.version()};
}

}  // namespace wavekv::client
