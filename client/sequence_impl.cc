#include "client/sequence_impl.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/attend_rows.h"
#include "client/calls.h"
#include "client/data_wire.h"
#include "client/validation.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {

Sequence::Impl::Impl(std::shared_ptr<Connection> connection_in, ModelShape shape_in, uint64_t id_in,
                     uint64_t epoch_in, uint64_t generation_in)
    : connection(std::move(connection_in)),
      shape(std::move(shape_in)),
      id(id_in),
      epoch(epoch_in),
      generation(generation_in),
      token_counts_(shape.layer_count, 0) {}

void Sequence::Impl::FillRef(v1::SequenceRef* ref) const {
  ref->set_sequence_id(id);
  ref->set_generation(generation.load(std::memory_order_acquire));
}

absl::Status Sequence::Impl::Gone(const char* call) const {
  return absl::FailedPreconditionError(
      absl::StrCat(call, ": sequence ", id, " belongs to epoch ", epoch, " of the daemon at ",
                   connection->options().address,
                   ", which was restarted: the sequence is gone, create it anew"));
}

absl::Status Sequence::Impl::CheckGeneration(uint64_t sent, uint64_t found) const {
  if (sent == found) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the daemon answered sequence ", id, " in generation ",
                                          found, ", asked was generation ", sent));
}

Connection::CallOptions Sequence::Impl::Call(const char* name) const {
  return {.name = name, .deadline = connection->options().deadline, .epoch = epoch};
}

uint64_t Sequence::Impl::TokenCount(uint32_t layer) const {
  MutexLock lock(&mutex_);
  return layer < token_counts_.size() ? token_counts_[layer] : 0;
}

void Sequence::Impl::RaiseTokenCount(uint32_t layer, uint64_t token_count, uint64_t of_generation) {
  MutexLock lock(&mutex_);
  if (of_generation != generation.load(std::memory_order_relaxed)) return;
  token_counts_[layer] = std::max(token_counts_[layer], token_count);
}

void Sequence::Impl::CapTokenCounts(uint64_t token_count, uint64_t new_generation) {
  MutexLock lock(&mutex_);
  generation.store(new_generation, std::memory_order_release);
  for (uint64_t& count : token_counts_) count = std::min(count, token_count);
}

absl::Status Sequence::Impl::Insert(uint64_t first_position, std::span<const uint32_t> layers,
                                    const Tensor& keys, const Tensor& values) {
  WAVEKV_ASSIGN_OR_RETURN(const InsertExtent extent, CheckInsert(shape, layers, keys, values));
  const InsertCall call{.sequence_id = id,
                        .generation = generation.load(std::memory_order_acquire),
                        .first_position = first_position,
                        .layers = layers,
                        .keys = &keys,
                        .values = &values,
                        .extent = extent};
  WAVEKV_ASSIGN_OR_RETURN(const uint64_t found, RunInsert(*connection, epoch, call, shape));
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(call.generation, found));
  for (const uint32_t layer : layers) {
    RaiseTokenCount(layer, first_position + extent.tokens, call.generation);
  }
  return absl::OkStatus();
}

absl::StatusOr<shm::LayerQueryRequest> Sequence::Impl::PrepareQuery(
    uint32_t layer, const Tensor& queries, const std::optional<Budget>& budget) const {
  WAVEKV_RETURN_IF_ERROR(CheckQueries(shape, layer, queries));
  if (budget.has_value()) WAVEKV_RETURN_IF_ERROR(CheckBudget(*budget));
  return shm::LayerQueryRequest{.sequence_id = id,
                                .generation = generation.load(std::memory_order_acquire),
                                .layer = layer,
                                .budget = ToRef(budget),
                                .queries = ToRef(queries)};
}

absl::StatusOr<shm::AttendItemRequest> Sequence::Impl::PrepareAttend(
    uint32_t layer, const StepTensors& tensors, const std::optional<Budget>& budget,
    bool exact) const {
  shm::AttendItemRequest item;
  WAVEKV_ASSIGN_OR_RETURN(item.query, PrepareQuery(layer, tensors.queries, budget));
  WAVEKV_RETURN_IF_ERROR(CheckAppend(shape, tensors.append_keys, tensors.append_values));
  item.append_keys = ToRef(tensors.append_keys);
  item.append_values = ToRef(tensors.append_values);
  if (item.append_keys.has_value()) item.append_position = TokenCount(layer);
  item.exact = exact;
  return item;
}

absl::StatusOr<Attention> Sequence::Impl::TakeAttention(const shm::AttendItemRequest& item,
                                                        absl::StatusOr<Attention> attention) {
  if (!attention.ok()) return attention;
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(item.query.generation, attention->generation));
  RaiseTokenCount(item.query.layer, attention->token_count, attention->generation);
  return attention;
}

absl::StatusOr<Attention> Sequence::Impl::Attend(uint32_t layer, const Tensor& queries,
                                                 const AttendOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(
      const shm::AttendItemRequest item,
      PrepareAttend(layer, {queries, options.append_keys, options.append_values}, options.budget,
                    options.exact));
  absl::StatusOr<Attention> result = absl::UnknownError("no answer was read");
  WAVEKV_RETURN_IF_ERROR(RunAttend(
      *connection, epoch, {&item, 1}, [this](size_t) -> const ModelShape& { return shape; },
      [&result](size_t, absl::StatusOr<Attention> attention) { result = std::move(attention); }));
  return TakeAttention(item, std::move(result));
}

absl::StatusOr<Estimation> Sequence::Impl::Estimate(uint32_t layer, const Tensor& queries,
                                                    const std::optional<Budget>& budget) {
  WAVEKV_ASSIGN_OR_RETURN(const shm::LayerQueryRequest request,
                          PrepareQuery(layer, queries, budget));
  WAVEKV_ASSIGN_OR_RETURN(Estimation estimation, RunEstimate(*connection, epoch, request, shape));
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(request.generation, estimation.generation));
  return estimation;
}

absl::StatusOr<QueryResult> Sequence::Impl::Query(uint32_t layer, const Tensor& queries,
                                                  const QueryOptions& options,
                                                  const StepLedger::Ticket& ticket) {
  shm::QueryRequest request;
  WAVEKV_ASSIGN_OR_RETURN(request.query, PrepareQuery(layer, queries, options.budget));
  request.inline_rows = options.inline_rows;
  request.completed_step = ticket.completed_step;
  WAVEKV_ASSIGN_OR_RETURN(QueryResult result,
                          RunQuery(*connection, epoch, request, shape, &query_reply_bytes));
  steps.Staged(ticket, result.step);
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(request.query.generation, result.generation));
  return result;
}

absl::StatusOr<Attention> Sequence::Impl::AttendStep(const Tensor& queries,
                                                     const QueryResult& query) {
  absl::StatusOr<std::shared_ptr<const StagedBuffer>> buffer =
      connection->buffers().Get(connection->buffer_access(), connection->options().deadline);
  absl::StatusOr<StagedRegion> region =
      buffer.ok() ? (*buffer)->FindStep(id, query.step) : buffer.status();
  if (!region.ok()) {
    // wavebufferd may have come, or come back, since the daemon told us where its buffer is.
    WAVEKV_ASSIGN_OR_RETURN(const BufferAccess access, connection->RefreshBufferAccess());
    WAVEKV_ASSIGN_OR_RETURN(buffer,
                            connection->buffers().Get(access, connection->options().deadline));
    WAVEKV_ASSIGN_OR_RETURN(region, (*buffer)->FindStep(id, query.step));
  }
  Attention attention;
  if ((*buffer)->in_host_memory()) {
    WAVEKV_ASSIGN_OR_RETURN(attention,
                            AttendBuffer(shape, queries, (*buffer)->data(), *region, query));
  } else {
    WAVEKV_ASSIGN_OR_RETURN(const StepCopy copy, (*buffer)->CopyStep(*region, shape, query));
    WAVEKV_ASSIGN_OR_RETURN(attention,
                            AttendBuffer(shape, queries, copy.bytes, copy.region, copy.query));
  }
  // Read first, then look: a region given back meanwhile has had its rows wiped.
  WAVEKV_RETURN_IF_ERROR((*buffer)->FindStep(id, query.step).status());
  return attention;
}

}  // namespace wavekv::client
