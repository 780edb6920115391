#include "client/calls.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/data_wire.h"
#include "client/wire.h"
#include "proto/shm/replies.h"
#include "storage/base/status_macros.h"
#include "storage/base/stream_copy.h"

namespace wavekv::client {
namespace {

constexpr uint64_t kQueryReplyBytesMin = uint64_t{64} << 10;
// The room that is left for a Query's reply grows at once and shrinks by this part a call.
constexpr uint64_t kHintShrinks = 64;

// How one call looks in the arena.
struct LocalCall {
  shm::Verb verb;
  uint64_t request_bytes;
  uint64_t reply_bytes;
  // It is a guess, to be corrected by what the daemon says it needs. Null: it always suffices.
  std::atomic<uint64_t>* reply_bytes_hint;
  absl::FunctionRef<void(std::span<std::byte>)> encode;
  absl::FunctionRef<absl::Status(std::span<const std::byte>)> read;
};

// One request and its answer; asked again when the reply needs more room than was thought.
shm::CallState ExchangeOne(shm::ClientChannel& channel, const LocalCall& local,
                           shm::TimePoint deadline, absl::Status* verdict) {
  uint64_t reply_bytes = local.reply_bytes;
  // A guess is no reason to keep others waiting for room.
  const uint64_t guess_max = channel.geometry().arena_bytes / 2;
  if (local.reply_bytes_hint != nullptr) reply_bytes = std::min(reply_bytes, guess_max);
  for (;;) {
    shm::ClientChannel::Call call;
    shm::CallState state = channel.Begin(local.request_bytes, reply_bytes, deadline, &call);
    if (state != shm::CallState::kAnswered) return state;
    local.encode(call.request());
    state = channel.Submit(local.verb, deadline, &call);
    if (state == shm::CallState::kAnswered) state = channel.Wait(deadline, &call);
    if (state != shm::CallState::kAnswered) return state;
    if (call.reply_bytes_needed() > reply_bytes) {
      reply_bytes = call.reply_bytes_needed();
      if (local.reply_bytes_hint != nullptr) {
        local.reply_bytes_hint->store(std::min(reply_bytes, guess_max), std::memory_order_relaxed);
      }
      continue;
    }
    PrefetchStreamed(call.reply().data(), call.reply().size());
    *verdict = call.status();
    if (verdict->ok()) *verdict = local.read(call.reply());
    return state;
  }
}

std::optional<absl::Status> RunOne(Connection& connection, Connection::CallOptions* options,
                                   const LocalCall& local) {
  return connection.RunLocal(options, [&local](shm::ClientChannel& channel, shm::TimePoint deadline,
                                               absl::Status* verdict) {
    return ExchangeOne(channel, local, deadline, verdict);
  });
}

Connection::CallOptions Options(const Connection& connection, const char* name, uint64_t epoch) {
  return {.name = name, .deadline = connection.options().deadline, .epoch = epoch};
}

absl::StatusOr<Attention> ResultFromWire(const v1::AttendResult& result, const ModelShape& shape) {
  if (result.error_code() == 0) return FromWire(result, shape);
  const bool known =
      result.error_code() <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
  return absl::Status(
      known ? static_cast<absl::StatusCode>(result.error_code()) : absl::StatusCode::kUnknown,
      result.error_message());
}

}  // namespace

absl::Status RunAttend(Connection& connection, uint64_t epoch,
                       std::span<const shm::AttendItemRequest> items,
                       absl::FunctionRef<const ModelShape&(size_t)> shape_of,
                       absl::FunctionRef<void(size_t, absl::StatusOr<Attention>)> take) {
  uint64_t reply_bytes = shm::AttendReplyBytes(0, 0, 0);
  for (size_t i = 0; i < items.size(); ++i) {
    const ModelShape& shape = shape_of(i);
    reply_bytes += shm::AttendReplyBytes(1, shape.query_head_count, shape.value_dim);
  }
  Connection::CallOptions options = Options(connection, "Attend", epoch);
  const std::optional<absl::Status> local =
      RunOne(connection, &options,
             {.verb = shm::kAttend,
              .request_bytes = shm::AttendBytes(items),
              .reply_bytes = reply_bytes,
              .reply_bytes_hint = nullptr,
              .encode = [&](std::span<std::byte> target) { shm::EncodeAttend(items, target); },
              .read =
                  [&](std::span<const std::byte> reply) {
                    return ReadAttendReply(reply, items.size(), shape_of, take);
                  }});
  if (local.has_value()) return *local;

  v1::AttendRequest request;
  for (const shm::AttendItemRequest& item : items) ToWire(item, request.add_items());
  v1::AttendReply reply;
  WAVEKV_RETURN_IF_ERROR(connection.Run(
      options, [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.Attend(context, request, &reply);
      }));
  if (reply.results_size() != request.items_size()) {
    return absl::InternalError(
        absl::StrCat("the daemon's reply is malformed: ", reply.results_size(), " results for ",
                     request.items_size(), " items"));
  }
  for (size_t i = 0; i < items.size(); ++i) {
    take(i, ResultFromWire(reply.results(static_cast<int>(i)), shape_of(i)));
  }
  return absl::OkStatus();
}

absl::StatusOr<QueryResult> RunQuery(Connection& connection, uint64_t epoch,
                                     const shm::QueryRequest& request, const ModelShape& shape,
                                     std::atomic<uint64_t>* reply_bytes_hint) {
  Connection::CallOptions options = Options(connection, "Query", epoch);
  absl::StatusOr<QueryResult> result = absl::UnknownError("no answer was read");
  const uint64_t hint = reply_bytes_hint->load(std::memory_order_relaxed);
  const std::optional<absl::Status> local = RunOne(
      connection, &options,
      {.verb = shm::kQuery,
       .request_bytes = shm::QueryBytes(request),
       .reply_bytes = std::max(hint + hint / 4, kQueryReplyBytesMin),
       .reply_bytes_hint = reply_bytes_hint,
       .encode = [&](std::span<std::byte> target) { shm::EncodeQuery(request, target); },
       .read =
           [&](std::span<const std::byte> reply) {
             const uint64_t last = reply_bytes_hint->load(std::memory_order_relaxed);
             reply_bytes_hint->store(std::max<uint64_t>(reply.size(), last - last / kHintShrinks),
                                     std::memory_order_relaxed);
             result = ReadQueryReply(reply, shape);
             return result.status();
           }});
  if (local.has_value()) return local->ok() ? std::move(result) : *local;

  v1::QueryRequest message;
  ToWire(request.query, &message);
  message.set_inline_(request.inline_rows);
  message.set_completed_step(request.completed_step);
  v1::QueryReply reply;
  WAVEKV_RETURN_IF_ERROR(connection.Run(
      options, [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.Query(context, message, &reply);
      }));
  return FromWire(reply, shape);
}

absl::StatusOr<Estimation> RunEstimate(Connection& connection, uint64_t epoch,
                                       const shm::LayerQueryRequest& request,
                                       const ModelShape& shape) {
  Connection::CallOptions options = Options(connection, "Estimate", epoch);
  absl::StatusOr<Estimation> result = absl::UnknownError("no answer was read");
  const std::optional<absl::Status> local =
      RunOne(connection, &options,
             {.verb = shm::kEstimate,
              .request_bytes = shm::EstimateBytes(request),
              .reply_bytes = shm::EstimateReplyBytes(shape.query_head_count, shape.value_dim),
              .reply_bytes_hint = nullptr,
              .encode = [&](std::span<std::byte> target) { shm::EncodeEstimate(request, target); },
              .read =
                  [&](std::span<const std::byte> reply) {
                    result = ReadEstimateReply(reply, shape);
                    return result.status();
                  }});
  if (local.has_value()) return local->ok() ? std::move(result) : *local;

  v1::EstimateRequest message;
  ToWire(request, &message);
  v1::EstimateReply reply;
  WAVEKV_RETURN_IF_ERROR(connection.Run(
      options, [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.Estimate(context, message, &reply);
      }));
  return FromWire(reply, shape);
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
