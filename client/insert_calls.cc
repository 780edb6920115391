// Insert, in pieces: a ring of them under way over shared memory, one stream of messages over gRPC.
#include <algorithm>
#include <array>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/calls.h"
#include "client/data_wire.h"
#include "client/wire.h"
#include "proto/shm/replies.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// One message over gRPC: large enough that its fixed cost is small, small enough that daemon and
// client overlap. The daemon's own limit, less the room for the message's other fields, may be
// lower.
constexpr size_t kMessageBytesMax = size_t{4} << 20;
constexpr size_t kMessageHeaderBytes = 8192;  // 1024 layer numbers, shapes and field tags.
// One piece over shared memory: so large that handing it over and waking helpers does not show, so
// small that the arena holds several: one is written while another is read. 1 and 2 MiB brought
// the same.
constexpr size_t kPieceBytesMax = size_t{2} << 20;
constexpr size_t kPiecesUnderWay = 4;

// keys or values of one piece: the extents of the axes, in the layout of `source`.
std::array<int64_t, 4> PieceShape(const Tensor& source, const InsertPiece& piece, uint32_t heads,
                                  uint32_t dim) {
  const auto tokens = static_cast<int64_t>(piece.token_count);
  if (source.layout == Layout::kNHD) return {piece.layer_count, tokens, heads, dim};
  return {piece.layer_count, heads, tokens, dim};
}

std::span<const uint32_t> LayersOf(const InsertCall& call, const InsertPiece& piece) {
  return call.layers.subspan(piece.first_layer, piece.layer_count);
}

// Puts one piece into a call's place.
shm::CallState PlacePiece(shm::ClientChannel& channel, const InsertCall& call,
                          const ModelShape& shape, const InsertPiece& piece,
                          shm::TimePoint deadline, shm::Room room,
                          shm::ClientChannel::Call* placed) {
  const auto key_shape = PieceShape(*call.keys, piece, shape.kv_head_count, shape.key_dim);
  const auto value_shape = PieceShape(*call.values, piece, shape.kv_head_count, shape.value_dim);
  shm::InsertRequest request{.sequence_id = call.sequence_id,
                             .generation = call.generation,
                             .first_position = call.first_position + piece.first_token,
                             .layers = LayersOf(call, piece),
                             .keys = DescribeRef(*call.keys, key_shape),
                             .values = DescribeRef(*call.values, value_shape)};
  const shm::InsertPlaces places = shm::PlaceInsert(request);
  const shm::CallState begun =
      channel.Begin(places.bytes, shm::InsertReplyBytes(), deadline, placed, room);
  if (begun != shm::CallState::kAnswered) return begun;
  const std::span<std::byte> target = placed->request();
  shm::EncodeInsert(request, target);
  GatherPiece(*call.keys, call.extent, piece, target.data() + places.keys_offset);
  GatherPiece(*call.values, call.extent, piece, target.data() + places.values_offset);
  return begun;
}

// Waits for the oldest piece. The verdict is its answer, checked.
shm::CallState WaitForPiece(shm::ClientChannel& channel, shm::TimePoint deadline,
                            shm::ClientChannel::Call* oldest, uint64_t* generation,
                            absl::Status* verdict) {
  const shm::CallState state = channel.Wait(deadline, oldest);
  if (state != shm::CallState::kAnswered) return state;
  *verdict = oldest->status();
  if (!verdict->ok()) return state;
  const absl::StatusOr<uint64_t> answer = ReadInsertReply(oldest->reply());
  *verdict = answer.status();
  if (answer.ok()) *generation = *answer;
  return state;
}

// Every piece in order, a few under way at a time, until one fails. Room is waited for with nothing
// under way: the inserts of several threads would otherwise wait for each other's pieces.
shm::CallState ExchangeInsert(shm::ClientChannel& channel, const InsertCall& call,
                              const ModelShape& shape, std::span<const InsertPiece> pieces,
                              shm::TimePoint deadline, uint64_t* generation,
                              absl::Status* verdict) {
  std::deque<shm::ClientChannel::Call> under_way;
  shm::CallState state = shm::CallState::kAnswered;
  const auto wait_for_oldest = [&] {
    state = WaitForPiece(channel, deadline, &under_way.front(), generation, verdict);
    under_way.pop_front();
    return state == shm::CallState::kAnswered && verdict->ok();
  };
  // `step` takes a Room; false when the insert has ended.
  const auto with_room = [&](const auto& step) {
    for (;;) {
      state = step(under_way.empty() ? shm::Room::kWait : shm::Room::kNow);
      if (state != shm::CallState::kFull) return state == shm::CallState::kAnswered;
      if (!wait_for_oldest()) return false;
    }
  };
  for (const InsertPiece& piece : pieces) {
    if (under_way.size() == kPiecesUnderWay && !wait_for_oldest()) return state;
    shm::ClientChannel::Call next;
    const bool submitted = with_room([&](shm::Room room) {
                             return PlacePiece(channel, call, shape, piece, deadline, room, &next);
                           }) &&
                           with_room([&](shm::Room room) {
                             return channel.Submit(shm::kInsert, deadline, &next, room);
                           });
    if (!submitted) return state;
    under_way.push_back(std::move(next));
  }
  while (!under_way.empty()) {
    if (!wait_for_oldest()) return state;
  }
  return state;
}

absl::StatusOr<uint64_t> StreamInsert(Connection& connection,
                                      const Connection::CallOptions& options,
                                      const InsertCall& call, const ModelShape& shape) {
  const uint64_t limit = connection.attachment()->info.message_bytes_max;
  const size_t bytes_max =
      std::min<uint64_t>(limit == 0 ? kMessageBytesMax : limit, kMessageBytesMax);
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<InsertPiece> pieces,
                          PlanInsert(call.extent, shape.token_bytes(),
                                     bytes_max - std::min(bytes_max, kMessageHeaderBytes)));
  v1::InsertRequest request;  // Reused, so that its buffers are allocated once.
  request.mutable_sequence()->set_sequence_id(call.sequence_id);
  request.mutable_sequence()->set_generation(call.generation);
  v1::InsertReply reply;
  WAVEKV_RETURN_IF_ERROR(connection.Run(
      options, [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        const auto writer = stub.Insert(context, &reply);
        for (const InsertPiece& piece : pieces) {
          request.set_first_position(call.first_position + piece.first_token);
          const std::span<const uint32_t> layers = LayersOf(call, piece);
          request.mutable_layers()->Assign(layers.begin(), layers.end());
          DescribeTensor(*call.keys,
                         PieceShape(*call.keys, piece, shape.kv_head_count, shape.key_dim),
                         request.mutable_keys());
          GatherPiece(*call.keys, call.extent, piece, request.mutable_keys()->mutable_data());
          DescribeTensor(*call.values,
                         PieceShape(*call.values, piece, shape.kv_head_count, shape.value_dim),
                         request.mutable_values());
          GatherPiece(*call.values, call.extent, piece, request.mutable_values()->mutable_data());
          if (!writer->Write(request)) break;  // Finish says why.
        }
        writer->WritesDone();
        return writer->Finish();
      }));
  if (reply.inserted_messages() != pieces.size()) {
    return absl::InternalError(absl::StrCat("Insert into sequence ", call.sequence_id,
                                            ": the daemon took ", reply.inserted_messages(), " of ",
                                            pieces.size(), " messages and called it done"));
  }
  return reply.generation();
}

}  // namespace

absl::StatusOr<uint64_t> RunInsert(Connection& connection, uint64_t epoch, const InsertCall& call,
                                   const ModelShape& shape) {
  Connection::CallOptions options{
      .name = "Insert", .deadline = connection.options().build_deadline, .epoch = epoch};
  uint64_t generation = 0;
  const std::optional<absl::Status> local = connection.RunLocal(
      &options, [&](shm::ClientChannel& channel, shm::TimePoint deadline, absl::Status* verdict) {
        const size_t bytes_max = std::min<uint64_t>(
            kPieceBytesMax, channel.geometry().arena_bytes / kPiecesUnderWay / 2);
        const auto pieces =
            PlanInsert(call.extent, shape.token_bytes(), std::max(bytes_max, shape.token_bytes()));
        *verdict = pieces.status();
        if (!pieces.ok()) return shm::CallState::kAnswered;
        return ExchangeInsert(channel, call, shape, *pieces, deadline, &generation, verdict);
      });
  if (!local.has_value()) return StreamInsert(connection, options, call, shape);
  if (!local->ok()) return *local;
  return generation;
}

}  // namespace wavekv::client
