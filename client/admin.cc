#include "client/admin.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/admin_wire.h"
#include "client/calls.h"
#include "client/connection.h"
#include "client/validation.h"
#include "client/wire.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

constexpr uint32_t kPageSize = 1000;
// Of a recording, which goes on for as long as somebody wants it.
constexpr std::chrono::hours kRecordDeadline(24 * 365);

}  // namespace

struct Admin::Impl {
  // One unary call without ids that belong to a life of the daemon: the caller names sequences by
  // what it was told, and NotFound is the answer when they are gone.
  template <class Request, class Reply>
  absl::Status Call(const char* name,
                    grpc::Status (v1::WaveKV::Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Reply*),
                    const Request& request, Reply* reply) {
    return connection->Run(
        {.name = name, .deadline = connection->options().deadline},
        [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
          return (stub.*method)(context, request, reply);
        });
  }

  // Writes name the generation; an operator means the present one.
  absl::Status FillCurrent(uint64_t sequence_id, v1::SequenceRef* ref) {
    v1::DescribeIndexRequest request;
    request.mutable_sequence()->set_sequence_id(sequence_id);
    v1::DescribeIndexReply reply;
    WAVEKV_RETURN_IF_ERROR(
        Call("DescribeIndex", &v1::WaveKV::Stub::DescribeIndex, request, &reply));
    ref->set_sequence_id(sequence_id);
    ref->set_generation(reply.generation());
    return absl::OkStatus();
  }

  std::shared_ptr<Connection> connection;
};

Admin::Admin(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Admin::~Admin() { impl_->connection->Close(); }

absl::StatusOr<std::unique_ptr<Admin>> Admin::Connect(ClientOptions options) {
  auto impl = std::make_unique<Impl>();
  options.shared_memory = false;  // It sends no data.
  WAVEKV_ASSIGN_OR_RETURN(impl->connection, Connection::Open(std::move(options)));
  return std::unique_ptr<Admin>(new Admin(std::move(impl)));
}

ClientInfo Admin::info() const {
  ClientInfo info = impl_->connection->attachment()->info;
  info.has_wave_buffer = !impl_->connection->buffer_access().ticket.empty();
  return info;
}

absl::StatusOr<DaemonStats> Admin::GetStats() {
  v1::GetStatsReply reply;
  WAVEKV_RETURN_IF_ERROR(
      impl_->Call("GetStats", &v1::WaveKV::Stub::GetStats, v1::GetStatsRequest(), &reply));
  return FromWire(reply);
}

absl::StatusOr<std::vector<SequenceSummary>> Admin::ListSequences(uint32_t count_max) {
  std::vector<SequenceSummary> sequences;
  v1::ListSequencesRequest request;
  while (sequences.size() < count_max) {
    request.set_page_size(
        std::min<uint32_t>(kPageSize, count_max - static_cast<uint32_t>(sequences.size())));
    v1::ListSequencesReply reply;
    WAVEKV_RETURN_IF_ERROR(
        impl_->Call("ListSequences", &v1::WaveKV::Stub::ListSequences, request, &reply));
    for (const v1::SequenceInfo& info : reply.sequences()) {
      if (sequences.size() == count_max) break;
      WAVEKV_ASSIGN_OR_RETURN(SequenceSummary summary, FromWire(info));
      sequences.push_back(std::move(summary));
    }
    // An empty page with a token would never end.
    if (reply.next_page_token().empty() || reply.sequences_size() == 0) break;
    request.set_page_token(reply.next_page_token());
  }
  return sequences;
}

absl::StatusOr<IndexDescription> Admin::DescribeIndex(uint64_t sequence_id,
                                                      std::optional<uint32_t> layer,
                                                      std::optional<uint32_t> kv_head) {
  v1::DescribeIndexRequest request;
  request.mutable_sequence()->set_sequence_id(sequence_id);
  if (layer.has_value()) request.set_layer(*layer);
  if (kv_head.has_value()) request.set_kv_head(*kv_head);
  v1::DescribeIndexReply reply;
  WAVEKV_RETURN_IF_ERROR(
      impl_->Call("DescribeIndex", &v1::WaveKV::Stub::DescribeIndex, request, &reply));
  return FromWire(reply);
}

absl::StatusOr<Explanation> Admin::Explain(uint64_t sequence_id, const ExplainOptions& options) {
  if (options.budget.has_value()) WAVEKV_RETURN_IF_ERROR(CheckBudget(*options.budget));
  v1::ExplainRequest request;
  request.mutable_sequence()->set_sequence_id(sequence_id);
  request.set_layer(options.layer);
  request.set_kv_head(options.kv_head);
  if (options.queries.has_value()) ToWire(*options.queries, request.mutable_queries());
  SetBudget(options.budget, &request);
  request.set_top(options.top);
  v1::ExplainReply reply;
  WAVEKV_RETURN_IF_ERROR(impl_->Call("Explain", &v1::WaveKV::Stub::Explain, request, &reply));
  return FromWire(reply);
}

absl::StatusOr<RecallSample> Admin::SampleRecall(uint64_t sequence_id,
                                                 std::span<const uint32_t> layers,
                                                 const std::optional<Budget>& budget) {
  if (budget.has_value()) WAVEKV_RETURN_IF_ERROR(CheckBudget(*budget));
  v1::SampleRecallRequest request;
  request.mutable_sequence()->set_sequence_id(sequence_id);
  request.mutable_layers()->Assign(layers.begin(), layers.end());
  SetBudget(budget, &request);
  v1::SampleRecallReply reply;
  WAVEKV_RETURN_IF_ERROR(
      impl_->Call("SampleRecall", &v1::WaveKV::Stub::SampleRecall, request, &reply));
  return FromWire(reply);
}

absl::StatusOr<BuildResult> Admin::BuildIndex(
    uint64_t sequence_id, const std::function<void(const BuildProgress&)>& progress) {
  v1::BuildIndexRequest request;
  WAVEKV_RETURN_IF_ERROR(impl_->FillCurrent(sequence_id, request.mutable_sequence()));
  return RunBuild(*impl_->connection, /*epoch=*/0, request, progress);
}

absl::Status Admin::RecordSequence(uint64_t sequence_id, const RecordOptions& options,
                                   std::stop_token stop,
                                   const std::function<absl::Status(std::string_view)>& take) {
  v1::RecordSequenceRequest request;
  request.mutable_sequence()->set_sequence_id(sequence_id);
  request.mutable_layers()->Assign(options.layers.begin(), options.layers.end());
  request.set_steps(options.steps);
  bool began = false;
  absl::Status taken;
  const absl::Status status = impl_->connection->Run(
      {.name = "RecordSequence", .deadline = kRecordDeadline},
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        if (began) {  // What came before cannot be asked for again.
          return grpc::Status(grpc::StatusCode::ABORTED,
                              "the daemon was restarted during the recording");
        }
        const std::stop_callback on_stop(stop, [context] { context->TryCancel(); });
        const auto reader = stub.RecordSequence(context, request);
        v1::RecordSequenceReply reply;
        while (reader->Read(&reply)) {
          began = true;
          taken = take(reply.records());
          if (taken.ok()) continue;
          context->TryCancel();
          break;
        }
        const grpc::Status finished = reader->Finish();
        return stop.stop_requested() || !taken.ok() ? grpc::Status::OK : finished;
      });
  return taken.ok() ? status : taken;
}

absl::Status Admin::DropSequence(uint64_t sequence_id) {
  v1::DropSequenceRequest request;
  WAVEKV_RETURN_IF_ERROR(impl_->FillCurrent(sequence_id, request.mutable_sequence()));
  v1::DropSequenceReply reply;
  return impl_->Call("DropSequence", &v1::WaveKV::Stub::DropSequence, request, &reply);
}

}  // namespace wavekv::client
