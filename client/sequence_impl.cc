#include "client/sequence_impl.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/attend_rows.h"
#include "client/insert_plan.h"
#include "client/validation.h"
#include "client/wire.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// One Insert message: large enough that its fixed cost is small, small enough that daemon and
// client overlap. The daemon's own limit, less the room for the message's other fields, may be
// lower.
constexpr size_t kInsertBytesMax = size_t{4} << 20;
constexpr size_t kInsertHeaderBytes = 8192;  // 1024 layer numbers, shapes and field tags.

// keys or values of one piece: the extents of the axes, in the layout of `source`.
std::vector<int64_t> PieceShape(const Tensor& source, const InsertPiece& piece, uint32_t heads,
                                uint32_t dim) {
  const auto tokens = static_cast<int64_t>(piece.token_count);
  if (source.layout == Layout::kNHD) return {piece.layer_count, tokens, heads, dim};
  return {piece.layer_count, heads, tokens, dim};
}

}  // namespace

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

Connection::CallOptions Sequence::Impl::LongCall(const char* name) const {
  return {.name = name, .deadline = connection->options().build_deadline, .epoch = epoch};
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

absl::Status Sequence::Impl::RunInsert(uint64_t first_position, std::span<const uint32_t> layers,
                                       const Tensor& keys, const Tensor& values) {
  WAVEKV_ASSIGN_OR_RETURN(const InsertExtent extent, CheckInsert(shape, layers, keys, values));
  const uint64_t message_bytes_max = connection->attachment()->info.message_bytes_max;
  const size_t bytes_max = std::min<uint64_t>(
      message_bytes_max == 0 ? kInsertBytesMax : message_bytes_max, kInsertBytesMax);
  WAVEKV_ASSIGN_OR_RETURN(
      const std::vector<InsertPiece> pieces,
      PlanInsert(extent, shape.token_bytes(), bytes_max - std::min(bytes_max, kInsertHeaderBytes)));

  v1::InsertRequest request;  // Reused, so that its buffers are allocated once.
  FillRef(request.mutable_sequence());
  const uint64_t sent_generation = request.sequence().generation();
  v1::InsertReply reply;
  WAVEKV_RETURN_IF_ERROR(connection->Run(
      LongCall("Insert"),
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        const auto writer = stub.Insert(context, &reply);
        for (const InsertPiece& piece : pieces) {
          request.set_first_position(first_position + piece.first_token);
          const auto first_layer = layers.begin() + piece.first_layer;
          request.mutable_layers()->Assign(first_layer, first_layer + piece.layer_count);
          DescribeTensor(keys, PieceShape(keys, piece, shape.kv_head_count, shape.key_dim),
                         request.mutable_keys());
          GatherPiece(keys, extent, piece, request.mutable_keys()->mutable_data());
          DescribeTensor(values, PieceShape(values, piece, shape.kv_head_count, shape.value_dim),
                         request.mutable_values());
          GatherPiece(values, extent, piece, request.mutable_values()->mutable_data());
          if (!writer->Write(request)) break;  // Finish says why.
        }
        writer->WritesDone();
        return writer->Finish();
      }));
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(sent_generation, reply.generation()));
  if (reply.inserted_messages() != pieces.size()) {
    return absl::InternalError(absl::StrCat("Insert into sequence ", id, ": the daemon took ",
                                            reply.inserted_messages(), " of ", pieces.size(),
                                            " messages and called it done"));
  }
  for (const uint32_t layer : layers) {
    RaiseTokenCount(layer, first_position + extent.tokens, sent_generation);
  }
  return absl::OkStatus();
}

absl::Status Sequence::Impl::FillAttendItem(uint32_t layer, const Tensor& queries,
                                            const AttendOptions& options,
                                            v1::AttendItem* item) const {
  WAVEKV_RETURN_IF_ERROR(CheckQueries(shape, layer, queries));
  WAVEKV_RETURN_IF_ERROR(CheckAppend(shape, options.append_keys, options.append_values));
  if (options.budget.has_value()) WAVEKV_RETURN_IF_ERROR(CheckBudget(*options.budget));
  FillRef(item->mutable_sequence());
  item->set_layer(layer);
  ToWire(queries, item->mutable_queries());
  SetBudget(options.budget, item);
  item->set_exact(options.exact);
  if (!options.append_keys.has_value()) return absl::OkStatus();
  ToWire(*options.append_keys, item->mutable_append_keys());
  ToWire(*options.append_values, item->mutable_append_values());
  item->set_append_position(TokenCount(layer));
  return absl::OkStatus();
}

absl::StatusOr<Attention> Sequence::Impl::TakeAttention(const v1::AttendItem& item,
                                                        const v1::AttendResult& result) {
  if (result.error_code() != 0) {
    const bool known =
        result.error_code() <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
    return absl::Status(
        known ? static_cast<absl::StatusCode>(result.error_code()) : absl::StatusCode::kUnknown,
        result.error_message());
  }
  WAVEKV_ASSIGN_OR_RETURN(Attention attention, FromWire(result, shape));
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(item.sequence().generation(), attention.generation));
  RaiseTokenCount(item.layer(), attention.token_count, attention.generation);
  return attention;
}

absl::StatusOr<QueryResult> Sequence::Impl::RunQuery(uint32_t layer, const Tensor& queries,
                                                     const QueryOptions& options,
                                                     const StepLedger::Ticket& ticket) {
  WAVEKV_RETURN_IF_ERROR(CheckQueries(shape, layer, queries));
  if (options.budget.has_value()) WAVEKV_RETURN_IF_ERROR(CheckBudget(*options.budget));
  v1::QueryRequest request;
  FillRef(request.mutable_sequence());
  request.set_layer(layer);
  ToWire(queries, request.mutable_queries());
  SetBudget(options.budget, &request);
  request.set_inline_(options.inline_rows);
  request.set_completed_step(ticket.completed_step);
  v1::QueryReply reply;
  WAVEKV_RETURN_IF_ERROR(connection->Run(
      Call("Query"), [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.Query(context, request, &reply);
      }));
  steps.Staged(ticket, reply.step());
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(request.sequence().generation(), reply.generation()));
  return FromWire(reply, shape);
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
  WAVEKV_ASSIGN_OR_RETURN(Attention attention,
                          AttendBuffer(shape, queries, (*buffer)->data(), *region, query));
  // Read first, then look: a region given back meanwhile has had its rows wiped.
  WAVEKV_RETURN_IF_ERROR((*buffer)->FindStep(id, query.step).status());
  return attention;
}

}  // namespace wavekv::client
