#include "client/session.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/calls.h"
#include "client/connection.h"
#include "client/sequence_impl.h"
#include "client/validation.h"
#include "client/wire.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {

struct Session::Impl {
  std::shared_ptr<Connection> connection;
};

Session::Session(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

Session::~Session() { impl_->connection->Close(); }

absl::StatusOr<std::unique_ptr<Session>> Session::Connect(ClientOptions options) {
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Connection> connection,
                          Connection::Open(std::move(options)));
  return std::unique_ptr<Session>(
      new Session(std::make_shared<Impl>(Impl{.connection = std::move(connection)})));
}

ClientInfo Session::info() const {
  ClientInfo info = impl_->connection->attachment()->info;
  info.has_wave_buffer = !impl_->connection->buffer_access().ticket.empty();
  info.shared_memory = impl_->connection->has_data_plane(&info.shared_memory_absent);
  return info;
}

absl::StatusOr<std::unique_ptr<Sequence>> Session::CreateSequence(const SequenceOptions& options) {
  WAVEKV_RETURN_IF_ERROR(ValidateModelShape(options.shape));
  if (options.index.budget.has_value()) {
    WAVEKV_RETURN_IF_ERROR(CheckBudget(*options.index.budget));
  }
  for (const auto& [layer, budget] : options.index.layer_budgets) {
    WAVEKV_RETURN_IF_ERROR(CheckLayer(options.shape, layer));
    WAVEKV_RETURN_IF_ERROR(CheckBudget(budget));
  }
  Connection& connection = *impl_->connection;
  v1::CreateSequenceRequest request;
  ToWire(options, &request);
  v1::CreateSequenceReply reply;
  uint64_t epoch = 0;
  WAVEKV_RETURN_IF_ERROR(connection.Run(
      {.name = "CreateSequence", .deadline = connection.options().deadline},
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment& attachment) {
        epoch = attachment.epoch;
        return stub.CreateSequence(context, request, &reply);
      }));
  if (reply.sequence_id() == 0 || reply.generation() == 0) {
    return absl::InternalError(absl::StrCat("the daemon's reply is malformed: sequence ",
                                            reply.sequence_id(), ", generation ",
                                            reply.generation(), "; expected numbers above 0"));
  }
  auto impl = std::make_unique<Sequence::Impl>(impl_->connection, options.shape,
                                               reply.sequence_id(), epoch, reply.generation());
  impl->max_tokens = options.max_tokens;
  impl->attach_wave_buffer = options.attach_wave_buffer;
  return std::unique_ptr<Sequence>(new Sequence(std::move(impl)));
}

absl::StatusOr<std::vector<absl::StatusOr<Attention>>> Session::AttendBatch(
    std::span<const AttendItem> items) {
  Connection& connection = *impl_->connection;
  const std::shared_ptr<const Attachment> attachment = connection.attachment();
  const size_t batch_max = std::max<uint32_t>(attachment->info.batch_max, 1);
  std::vector<absl::StatusOr<Attention>> results(items.size(), absl::UnknownError("not attended"));
  std::vector<size_t> sent;  // Indices of the items of the request being filled.
  std::vector<shm::AttendItemRequest> request;

  const auto flush = [&]() -> absl::Status {
    if (sent.empty()) return absl::OkStatus();
    const auto sequence_of = [&](size_t i) -> Sequence::Impl& {
      return *items[sent[i]].sequence->impl_;
    };
    WAVEKV_RETURN_IF_ERROR(RunAttend(
        connection, attachment->epoch, request,
        [&](size_t i) -> const ModelShape& { return sequence_of(i).shape; },
        [&](size_t i, absl::StatusOr<Attention> attention) {
          results[sent[i]] = sequence_of(i).TakeAttention(request[i], std::move(attention));
        }));
    request.clear();
    sent.clear();
    return absl::OkStatus();
  };

  for (size_t i = 0; i < items.size(); ++i) {
    const AttendItem& item = items[i];
    if (item.sequence == nullptr || item.sequence->impl_->connection != impl_->connection) {
      results[i] = absl::InvalidArgumentError(
          absl::StrCat("item ", i, ": expected a sequence of this session, found ",
                       item.sequence == nullptr ? "null" : "another session's"));
      continue;
    }
    if (item.sequence->impl_->epoch != attachment->epoch) {
      results[i] = item.sequence->impl_->Gone("Attend");
      continue;
    }
    absl::StatusOr<shm::AttendItemRequest> prepared = item.sequence->impl_->PrepareAttend(
        item.layer, {item.queries, item.append_keys, item.append_values}, item.budget, item.exact);
    if (!prepared.ok()) {
      results[i] = prepared.status();
      continue;
    }
    request.push_back(*std::move(prepared));
    sent.push_back(i);
    if (sent.size() == batch_max) WAVEKV_RETURN_IF_ERROR(flush());
  }
  WAVEKV_RETURN_IF_ERROR(flush());
  return results;
}

}  // namespace wavekv::client
