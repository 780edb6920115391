#include "proto/shm/requests.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/shm/channel_layout.h"
#include "proto/shm/request_layout.h"
#include "storage/base/check.h"
#include "storage/base/model_shape.h"
#include "storage/base/status_macros.h"
#include "storage/base/stream_copy.h"
#include "storage/base/tensor_bytes.h"

namespace wavekv::shm {
namespace {

static_assert(kInsertHeadBytesMax == sizeof(WireInsert) + kLayersMax * sizeof(uint32_t));

// Writes records and tensors into a request, each where it belongs.
class RequestWriter {
 public:
  // Tensors go from `tensors_at` on.
  RequestWriter(std::span<std::byte> target, uint64_t tensors_at)
      : target_(target), next_(ArenaRounded(tensors_at)) {}

  template <class Record>
  void Put(uint64_t offset, const Record& record) {
    WAVEKV_CHECK(offset + sizeof record <= target_.size(), "a request larger than its place");
    std::memcpy(target_.data() + offset, &record, sizeof record);
  }

  WireTensor Add(const TensorRef& tensor, uint64_t bytes) {
    WAVEKV_CHECK(tensor.shape.size() <= kRequestRankMax, "a tensor of too many axes");
    WAVEKV_CHECK(next_ + bytes <= target_.size(), "a request larger than its place");
    WireTensor wire;
    wire.dtype = static_cast<uint8_t>(tensor.dtype);
    wire.layout = static_cast<uint8_t>(tensor.layout);
    wire.rank = static_cast<uint8_t>(tensor.shape.size());
    std::copy(tensor.shape.begin(), tensor.shape.end(), wire.shape);
    wire.offset = next_;
    wire.bytes = bytes;
    if (!tensor.data.empty()) StreamCopy(target_.data() + next_, tensor.data.data(), bytes);
    next_ += ArenaRounded(bytes);
    return wire;
  }
  WireTensor Add(const TensorRef& tensor) { return Add(tensor, tensor.data.size()); }

  WireLayerQuery Query(const LayerQueryRequest& query, uint32_t flags, uint64_t argument) {
    WireLayerQuery wire;
    wire.sequence_id = query.sequence_id;
    wire.generation = query.generation;
    wire.layer = query.layer;
    wire.flags = flags;
    wire.argument = argument;
    if (query.budget.has_value()) {
      wire.budget = {.kind = static_cast<uint32_t>(query.budget->kind),
                     .clusters_max = query.budget->clusters_max,
                     .sketch_clusters = query.budget->sketch_clusters,
                     .value = query.budget->value,
                     .estimate_ratio = query.budget->estimate_ratio};
    }
    wire.queries = Add(query.queries);
    return wire;
  }

 private:
  const std::span<std::byte> target_;
  uint64_t next_;
};

uint64_t BytesOf(const std::optional<TensorRef>& tensor) {
  return tensor.has_value() ? ArenaRounded(tensor->data.size()) : 0;
}

uint64_t LayerQueryBytes(const LayerQueryRequest& query) {
  return ArenaRounded(sizeof(WireLayerQuery)) + ArenaRounded(query.queries.data.size());
}

// A record at `offset`, copied. InvalidArgument when the bytes end before it does.
template <class Record>
absl::StatusOr<Record> ReadRecord(std::span<const std::byte> bytes, uint64_t offset,
                                  absl::string_view what) {
  Record record;
  if (offset > bytes.size() || bytes.size() - offset < sizeof record) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": the request has ", bytes.size(),
                                                   " bytes, expected at least ",
                                                   offset + sizeof record));
  }
  std::memcpy(&record, bytes.data() + offset, sizeof record);
  return record;
}

// The tensor whose record lies at `at` of `head`, with its data in `bytes`. Nothing: there is none.
absl::StatusOr<std::optional<TensorRef>> ReadTensor(std::span<const std::byte> head, uint64_t at,
                                                    std::span<const std::byte> bytes,
                                                    absl::string_view name) {
  WAVEKV_ASSIGN_OR_RETURN(const WireTensor wire, ReadRecord<WireTensor>(head, at, name));
  if (wire.dtype == 0 && wire.rank == 0 && wire.bytes == 0) return std::optional<TensorRef>();
  if (wire.dtype < static_cast<uint8_t>(DType::kF32) ||
      wire.dtype > static_cast<uint8_t>(DType::kBF16)) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": dtype is ", int{wire.dtype},
                                                   ", expected F32 (1), F16 (2) or BF16 (3)"));
  }
  if (wire.layout != static_cast<uint8_t>(TensorLayout::kNHD) &&
      wire.layout != static_cast<uint8_t>(TensorLayout::kHND)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": layout is ", int{wire.layout}, ", expected NHD (1) or HND (2)"));
  }
  if (wire.rank > kRequestRankMax) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": the shape has ", int{wire.rank},
                                                   " dimensions, at most ", kRequestRankMax,
                                                   " are allowed"));
  }
  TensorRef tensor;
  tensor.dtype = static_cast<DType>(wire.dtype);
  tensor.layout = static_cast<TensorLayout>(wire.layout);
  // In place: the copy on the stack goes, the head stays.
  tensor.shape = {reinterpret_cast<const int64_t*>(head.data() + at + offsetof(WireTensor, shape)),
                  wire.rank};
  WAVEKV_RETURN_IF_ERROR(CheckTensorData(name, tensor.dtype, tensor.shape, wire.bytes));
  if (wire.offset > bytes.size() || wire.bytes > bytes.size() - wire.offset) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", wire.bytes, " bytes at ",
                                                   wire.offset, " pass the end of the request at ",
                                                   bytes.size()));
  }
  tensor.data = bytes.subspan(wire.offset, wire.bytes);
  return std::optional<TensorRef>(tensor);
}

absl::StatusOr<TensorRef> ReadRequiredTensor(std::span<const std::byte> head, uint64_t at,
                                             std::span<const std::byte> bytes,
                                             absl::string_view name) {
  WAVEKV_ASSIGN_OR_RETURN(const std::optional<TensorRef> tensor, ReadTensor(head, at, bytes, name));
  if (!tensor.has_value()) return absl::InvalidArgumentError(absl::StrCat(name, " is missing"));
  return *tensor;
}

absl::StatusOr<std::optional<BudgetRef>> ReadBudget(const WireBudget& wire) {
  if (wire.kind == 0) return std::optional<BudgetRef>();
  if (wire.kind > static_cast<uint32_t>(BudgetRefKind::kError)) {
    return absl::InvalidArgumentError(
        "budget has no kind: expected ratio, clusters, coverage or error");
  }
  return std::optional<BudgetRef>({.kind = static_cast<BudgetRefKind>(wire.kind),
                                   .value = wire.value,
                                   .estimate_ratio = wire.estimate_ratio,
                                   .clusters_max = wire.clusters_max,
                                   .sketch_clusters = wire.sketch_clusters});
}

absl::Status CheckSequenceId(uint64_t sequence_id) {
  if (sequence_id != 0) return absl::OkStatus();
  return absl::InvalidArgumentError("sequence.sequence_id is missing");
}

absl::Status CheckFlags(uint32_t flags, uint32_t known) {
  if ((flags & ~known) == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("flags are ", flags, ", expected no others than ", known));
}

// Of the WireLayerQuery at `at`.
absl::StatusOr<LayerQueryRequest> ReadLayerQuery(std::span<const std::byte> bytes, uint64_t at,
                                                 const WireLayerQuery& wire, uint32_t flags_known) {
  WAVEKV_RETURN_IF_ERROR(CheckSequenceId(wire.sequence_id));
  WAVEKV_RETURN_IF_ERROR(CheckFlags(wire.flags, flags_known));
  LayerQueryRequest query;
  query.sequence_id = wire.sequence_id;
  query.generation = wire.generation;
  query.layer = wire.layer;
  WAVEKV_ASSIGN_OR_RETURN(
      query.queries,
      ReadRequiredTensor(bytes, at + offsetof(WireLayerQuery, queries), bytes, "queries"));
  WAVEKV_ASSIGN_OR_RETURN(query.budget, ReadBudget(wire.budget));
  return query;
}

absl::StatusOr<AttendItemRequest> ReadAttendItem(std::span<const std::byte> bytes, uint64_t at) {
  WAVEKV_ASSIGN_OR_RETURN(const auto wire, ReadRecord<WireLayerQuery>(bytes, at, "item"));
  AttendItemRequest item;
  WAVEKV_ASSIGN_OR_RETURN(item.query, ReadLayerQuery(bytes, at, wire, kFlagExact));
  WAVEKV_ASSIGN_OR_RETURN(
      item.append_keys,
      ReadTensor(bytes, at + offsetof(WireAttendItem, append_keys), bytes, "append_keys"));
  WAVEKV_ASSIGN_OR_RETURN(
      item.append_values,
      ReadTensor(bytes, at + offsetof(WireAttendItem, append_values), bytes, "append_values"));
  if (item.append_keys.has_value() != item.append_values.has_value()) {
    return absl::InvalidArgumentError("append_keys and append_values come together");
  }
  item.append_position = wire.argument;
  item.exact = (wire.flags & kFlagExact) != 0;
  return item;
}

// product(shape) * element size of a tensor of our own.
uint64_t ShapeBytes(const TensorRef& tensor) {
  const absl::StatusOr<uint64_t> bytes = TensorBytes(tensor.dtype, tensor.shape);
  WAVEKV_CHECK(bytes.ok(), "the shape of a tensor of our own overflows");
  return *bytes;
}

}  // namespace

uint64_t AttendBytes(std::span<const AttendItemRequest> items) {
  uint64_t bytes = sizeof(WireAttend) + items.size() * sizeof(WireAttendItem);
  for (const AttendItemRequest& item : items) {
    bytes += ArenaRounded(item.query.queries.data.size()) + BytesOf(item.append_keys) +
             BytesOf(item.append_values);
  }
  return bytes;
}

void EncodeAttend(std::span<const AttendItemRequest> items, std::span<std::byte> target) {
  RequestWriter writer(target, sizeof(WireAttend) + items.size() * sizeof(WireAttendItem));
  WireAttend head;
  head.item_count = static_cast<uint32_t>(items.size());
  writer.Put(0, head);
  uint64_t at = sizeof head;
  for (const AttendItemRequest& item : items) {
    WireAttendItem wire;
    wire.query = writer.Query(item.query, item.exact ? kFlagExact : 0, item.append_position);
    if (item.append_keys.has_value()) wire.append_keys = writer.Add(*item.append_keys);
    if (item.append_values.has_value()) wire.append_values = writer.Add(*item.append_values);
    writer.Put(at, wire);
    at += sizeof wire;
  }
  StreamFence();
}

uint64_t QueryBytes(const QueryRequest& request) { return LayerQueryBytes(request.query); }

void EncodeQuery(const QueryRequest& request, std::span<std::byte> target) {
  RequestWriter writer(target, sizeof(WireLayerQuery));
  writer.Put(0, writer.Query(request.query, request.inline_rows ? kFlagInline : 0,
                             request.completed_step));
  StreamFence();
}

uint64_t EstimateBytes(const LayerQueryRequest& request) { return LayerQueryBytes(request); }

void EncodeEstimate(const LayerQueryRequest& request, std::span<std::byte> target) {
  RequestWriter writer(target, sizeof(WireLayerQuery));
  writer.Put(0, writer.Query(request, 0, 0));
  StreamFence();
}

InsertPlaces PlaceInsert(const InsertRequest& request) {
  InsertPlaces places;
  places.keys_offset = ArenaRounded(sizeof(WireInsert) + request.layers.size() * sizeof(uint32_t));
  places.values_offset = places.keys_offset + ArenaRounded(ShapeBytes(request.keys));
  places.bytes = places.values_offset + ArenaRounded(ShapeBytes(request.values));
  return places;
}

void EncodeInsert(const InsertRequest& request, std::span<std::byte> target) {
  const uint64_t layers_bytes = request.layers.size() * sizeof(uint32_t);
  RequestWriter writer(target, sizeof(WireInsert) + layers_bytes);
  WireInsert wire;
  wire.sequence_id = request.sequence_id;
  wire.generation = request.generation;
  wire.first_position = request.first_position;
  wire.layer_count = static_cast<uint32_t>(request.layers.size());
  wire.keys = writer.Add(request.keys, ShapeBytes(request.keys));
  wire.values = writer.Add(request.values, ShapeBytes(request.values));
  writer.Put(0, wire);
  if (layers_bytes > 0) {
    std::memcpy(target.data() + sizeof wire, request.layers.data(), layers_bytes);
  }
  StreamFence();
}

absl::Status DecodeAttend(std::span<const std::byte> bytes, uint32_t items_max,
                          AttendItems* items) {
  items->clear();
  WAVEKV_ASSIGN_OR_RETURN(const auto head, ReadRecord<WireAttend>(bytes, 0, "attend"));
  if (head.item_count == 0 || head.item_count > items_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("items has ", head.item_count, " entries, expected 1 to ", items_max));
  }
  if ((bytes.size() - sizeof head) / sizeof(WireAttendItem) < head.item_count) {
    return absl::InvalidArgumentError(absl::StrCat("attend: the request has ", bytes.size(),
                                                   " bytes, too few for ", head.item_count,
                                                   " items"));
  }
  for (uint32_t i = 0; i < head.item_count; ++i) {
    items->push_back(ReadAttendItem(bytes, sizeof head + i * sizeof(WireAttendItem)));
  }
  return absl::OkStatus();
}

absl::StatusOr<QueryRequest> DecodeQuery(std::span<const std::byte> bytes) {
  WAVEKV_ASSIGN_OR_RETURN(const auto wire, ReadRecord<WireLayerQuery>(bytes, 0, "query"));
  QueryRequest request;
  WAVEKV_ASSIGN_OR_RETURN(request.query, ReadLayerQuery(bytes, 0, wire, kFlagInline));
  request.inline_rows = (wire.flags & kFlagInline) != 0;
  request.completed_step = wire.argument;
  return request;
}

absl::StatusOr<LayerQueryRequest> DecodeEstimate(std::span<const std::byte> bytes) {
  WAVEKV_ASSIGN_OR_RETURN(const auto wire, ReadRecord<WireLayerQuery>(bytes, 0, "estimate"));
  return ReadLayerQuery(bytes, 0, wire, 0);
}

absl::StatusOr<InsertRequest> DecodeInsert(std::span<const std::byte> head,
                                           std::span<const std::byte> shared) {
  WAVEKV_ASSIGN_OR_RETURN(const auto wire, ReadRecord<WireInsert>(head, 0, "insert"));
  WAVEKV_RETURN_IF_ERROR(CheckSequenceId(wire.sequence_id));
  if (wire.layer_count > kLayersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("layers has ", wire.layer_count, " entries, expected at most ", kLayersMax));
  }
  if ((head.size() - sizeof wire) / sizeof(uint32_t) < wire.layer_count) {
    return absl::InvalidArgumentError(absl::StrCat("insert: the request has ", head.size(),
                                                   " bytes, too few for ", wire.layer_count,
                                                   " layers"));
  }
  InsertRequest request;
  request.sequence_id = wire.sequence_id;
  request.generation = wire.generation;
  request.first_position = wire.first_position;
  request.layers = {reinterpret_cast<const uint32_t*>(head.data() + sizeof wire), wire.layer_count};
  WAVEKV_ASSIGN_OR_RETURN(request.keys,
                          ReadRequiredTensor(head, offsetof(WireInsert, keys), shared, "keys"));
  WAVEKV_ASSIGN_OR_RETURN(request.values,
                          ReadRequiredTensor(head, offsetof(WireInsert, values), shared, "values"));
  return request;
}

}  // namespace wavekv::shm
