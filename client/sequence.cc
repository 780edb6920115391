#include <utility>

#include "absl/strings/str_cat.h"
#include "client/calls.h"
#include "client/sequence_impl.h"
#include "client/validation.h"
#include "client/wire.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {

Sequence::Sequence(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Sequence::~Sequence() {
  if (!impl_->owned.load(std::memory_order_acquire) || impl_->connection->closed()) return;
  // An error is of no use here: a daemon that is away lets the lease end instead.
  Drop().IgnoreError();
}

uint64_t Sequence::id() const { return impl_->id; }
uint64_t Sequence::generation() const { return impl_->generation.load(std::memory_order_acquire); }
const ModelShape& Sequence::shape() const { return impl_->shape; }
uint64_t Sequence::token_count(uint32_t layer) const { return impl_->TokenCount(layer); }

absl::Status Sequence::Insert(uint64_t first_position, std::span<const uint32_t> layers,
                              const Tensor& keys, const Tensor& values) {
  return impl_->Insert(first_position, layers, keys, values);
}

absl::StatusOr<BuildResult> Sequence::BuildIndex(
    const std::function<void(const BuildProgress&)>& progress) {
  v1::BuildIndexRequest request;
  impl_->FillRef(request.mutable_sequence());
  return RunBuild(*impl_->connection, impl_->epoch, request, progress);
}

absl::StatusOr<Attention> Sequence::Attend(uint32_t layer, const Tensor& queries,
                                           const AttendOptions& options) {
  return impl_->Attend(layer, queries, options);
}

absl::StatusOr<QueryResult> Sequence::Query(uint32_t layer, const Tensor& queries,
                                            const QueryOptions& options) {
  const StepLedger::Ticket ticket = impl_->steps.Begin();
  absl::StatusOr<QueryResult> result = impl_->Query(layer, queries, options, ticket);
  impl_->steps.Finish(ticket);
  return result;
}

absl::StatusOr<Estimation> Sequence::Estimate(uint32_t layer, const Tensor& queries,
                                              const std::optional<Budget>& budget) {
  return impl_->Estimate(layer, queries, budget);
}

absl::StatusOr<std::unique_ptr<Sequence>> Sequence::Fork(uint64_t token_count, uint64_t max_tokens,
                                                         std::string label) {
  v1::ForkSequenceRequest request;
  impl_->FillRef(request.mutable_sequence());
  request.set_token_count(token_count);
  request.set_max_tokens(max_tokens);
  request.set_label(std::move(label));
  v1::ForkSequenceReply reply;
  std::vector<uint64_t> counts;
  for (uint32_t layer = 0; layer < impl_->shape.layer_count; ++layer) {
    counts.push_back(impl_->TokenCount(layer));
  }
  WAVEKV_RETURN_IF_ERROR(impl_->connection->Run(
      impl_->Call("ForkSequence"),
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.ForkSequence(context, request, &reply);
      }));
  if (reply.sequence_id() == 0 || reply.sequence_id() == impl_->id || reply.generation() == 0) {
    return absl::InternalError(absl::StrCat("the daemon's reply is malformed: fork ",
                                            reply.sequence_id(), " of sequence ", impl_->id,
                                            ", generation ", reply.generation()));
  }
  auto child = std::make_unique<Impl>(impl_->connection, impl_->shape, reply.sequence_id(),
                                      impl_->epoch, reply.generation());
  child->max_tokens = max_tokens == 0 ? impl_->max_tokens : max_tokens;
  child->attach_wave_buffer = impl_->attach_wave_buffer;
  for (uint32_t layer = 0; layer < counts.size(); ++layer) {
    child->RaiseTokenCount(layer, counts[layer], reply.generation());
  }
  child->CapTokenCounts(reply.token_count(), reply.generation());
  return std::unique_ptr<Sequence>(new Sequence(std::move(child)));
}

absl::Status Sequence::Truncate(uint64_t token_count) {
  v1::TruncateSequenceRequest request;
  impl_->FillRef(request.mutable_sequence());
  request.set_token_count(token_count);
  v1::TruncateSequenceReply reply;
  WAVEKV_RETURN_IF_ERROR(impl_->connection->Run(
      impl_->Call("TruncateSequence"),
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.TruncateSequence(context, request, &reply);
      }));
  if (reply.generation() <= request.sequence().generation()) {
    return absl::InternalError(absl::StrCat(
        "the daemon's reply is malformed: truncating sequence ", impl_->id, " gave generation ",
        reply.generation(), ", expected one above ", request.sequence().generation()));
  }
  impl_->CapTokenCounts(reply.token_count(), reply.generation());
  return absl::OkStatus();
}

absl::Status Sequence::Drop() {
  v1::DropSequenceRequest request;
  impl_->FillRef(request.mutable_sequence());
  v1::DropSequenceReply reply;
  const absl::Status status = impl_->connection->Run(
      impl_->Call("DropSequence"),
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.DropSequence(context, request, &reply);
      });
  if (status.ok()) impl_->owned.store(false, std::memory_order_release);
  return status;
}

void Sequence::Release() { impl_->owned.store(false, std::memory_order_release); }

absl::Status Sequence::Pin(bool pinned) {
  v1::PinRequest request;
  impl_->FillRef(request.mutable_sequence());
  request.set_pinned(pinned);
  v1::PinReply reply;
  return impl_->connection->Run(
      impl_->Call("Pin"), [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context,
                              const Attachment&) { return stub.Pin(context, request, &reply); });
}

absl::Status Sequence::SetTtl(std::chrono::milliseconds ttl) {
  if (ttl.count() < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("ttl: expected 0 ms (none) or more, found ", ttl.count(), " ms"));
  }
  v1::SetTtlRequest request;
  impl_->FillRef(request.mutable_sequence());
  request.set_ttl_ms(static_cast<uint64_t>(ttl.count()));
  v1::SetTtlReply reply;
  return impl_->connection->Run(
      impl_->Call("SetTtl"),
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.SetTtl(context, request, &reply);
      });
}

absl::StatusOr<Attention> Sequence::AttendStaged(uint32_t layer, const Tensor& queries,
                                                 const QueryOptions& options) {
  if (!impl_->attach_wave_buffer) {
    return absl::FailedPreconditionError(
        absl::StrCat("AttendStaged: sequence ", impl_->id,
                     " was created without SequenceOptions::attach_wave_buffer"));
  }
  const StepLedger::Ticket ticket = impl_->steps.Begin();
  const absl::StatusOr<QueryResult> query = impl_->Query(layer, queries, options, ticket);
  absl::StatusOr<Attention> attention =
      query.ok() ? impl_->AttendStep(queries, *query) : absl::StatusOr<Attention>(query.status());
  impl_->steps.Finish(ticket);
  return attention;
}

}  // namespace wavekv::client
