#include "storage/trace/trace_layout.h"

#include <cstring>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "storage/base/crc32c.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

struct WireBudget {
  uint32_t kind = 0;
  uint32_t clusters_max = 0;
  uint32_t sketch_clusters = 0;
  uint32_t zero = 0;
  double value = 0;
  double estimate_ratio = 0;
};
static_assert(sizeof(WireBudget) == 32);

struct WireSequence {
  uint32_t layer_count = 0;
  uint32_t query_head_count = 0;
  uint32_t kv_head_count = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  uint32_t dtype = 0;
  float softmax_scale = 0;
  uint32_t first_kv_head = 0;
  uint32_t total_kv_head_count = 0;
  uint32_t segment_tokens = 0;
  uint32_t small_segment_tokens = 0;
  uint32_t tokens_per_cluster = 0;
  uint32_t kmeans_iterations = 0;
  uint32_t flags = 0;
  uint64_t max_tokens = 0;
  uint64_t sequence_id = 0;
  uint64_t generation = 0;
  uint64_t began_unix_ms = 0;
  WireBudget budget;
  uint32_t traced_layer_count = 0;
  uint32_t layer_budget_count = 0;
  uint32_t dense_layer_count = 0;
  uint32_t model_id_bytes = 0;
  uint32_t label_bytes = 0;
  uint32_t daemon_version_bytes = 0;
};
static_assert(sizeof(WireSequence) == 144);
constexpr uint32_t kFlagSketch = 1;
constexpr uint32_t kFlagBuilt = 2;

struct WireTracedLayer {
  uint32_t layer = 0;
  uint32_t zero = 0;
  uint64_t token_count = 0;
};
static_assert(sizeof(WireTracedLayer) == 16);

struct WireLayerBudget {
  uint32_t layer = 0;
  uint32_t zero = 0;
  WireBudget budget;
};
static_assert(sizeof(WireLayerBudget) == 40);

struct WireRows {
  uint32_t layer = 0;
  uint32_t origin = 0;
  uint64_t generation = 0;
  uint64_t first_position = 0;
  uint64_t token_count = 0;
};
static_assert(sizeof(WireRows) == 32);

struct WireStep {
  uint32_t layer = 0;
  uint32_t verb = 0;
  uint32_t flags = 0;
  uint32_t zero = 0;
  uint64_t generation = 0;
  uint64_t version = 0;
  uint64_t token_count = 0;
  uint64_t at_us = 0;
  WireBudget budget;
};
static_assert(sizeof(WireStep) == 80);
constexpr uint32_t kFlagExact = 1;

struct WireTruncate {
  uint64_t generation = 0;
  uint64_t token_count = 0;
};
static_assert(sizeof(WireTruncate) == 16);

struct WireEnd {
  uint32_t reason = 0;
  uint32_t zero = 0;
  uint64_t step_count = 0;
};
static_assert(sizeof(WireEnd) == 16);

// An enumerator of one byte; 0, which is none, for what is larger.
template <class Enum>
Enum EnumOf(uint32_t number) {
  return static_cast<Enum>(number <= UINT8_MAX ? number : 0);
}

WireBudget ToWire(const TraceBudget& budget) {
  return {.kind = static_cast<uint32_t>(budget.kind),
          .clusters_max = budget.clusters_max,
          .sketch_clusters = budget.sketch_clusters,
          .value = budget.value,
          .estimate_ratio = budget.estimate_ratio};
}

TraceBudget FromWire(const WireBudget& wire) {
  TraceBudget budget;
  budget.kind = EnumOf<TraceBudgetKind>(wire.kind);
  budget.value = wire.value;
  budget.clusters_max = wire.clusters_max;
  budget.estimate_ratio = wire.estimate_ratio;
  budget.sketch_clusters = wire.sketch_clusters;
  return budget;
}

// Puts a record's parts one after another behind the room for its frame.
class PayloadWriter {
 public:
  PayloadWriter() : bytes_(sizeof(TraceFrame)) {}

  template <class Record>
  requires std::is_trivially_copyable_v<Record>
  void Put(const Record& record) { PutBytes(&record, sizeof record); }
  template <class Element>
  void PutAll(const std::vector<Element>& elements) {
    PutBytes(elements.data(), elements.size() * sizeof(Element));
  }
  void PutText(const std::string& text) { PutBytes(text.data(), text.size()); }

  absl::StatusOr<std::vector<std::byte>> Seal(TraceType type, uint64_t number) && {
    const std::span<const std::byte> payload = std::span(bytes_).subspan(sizeof(TraceFrame));
    if (payload.size() > kTracePayloadBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a record of ", payload.size(), " bytes, expected at most ", kTracePayloadBytesMax));
    }
    TraceFrame frame;
    frame.type = static_cast<uint32_t>(type);
    frame.payload_bytes = static_cast<uint32_t>(payload.size());
    frame.number = number;
    frame.payload_crc = Crc32c(payload);
    frame.frame_crc = Crc32c(std::as_bytes(std::span(&frame, 1)).first(kTraceFrameCrcBytes));
    std::memcpy(bytes_.data(), &frame, sizeof frame);
    return std::move(bytes_);
  }

 private:
  void PutBytes(const void* data, size_t count) {
    const auto* const begin = static_cast<const std::byte*>(data);
    bytes_.insert(bytes_.end(), begin, begin + count);
  }

  std::vector<std::byte> bytes_;
};

// Takes a payload's parts one after another; once they do not fit, everything fails.
class PayloadReader {
 public:
  explicit PayloadReader(std::span<const std::byte> payload)
      : size_(payload.size()), rest_(payload) {}

  template <class Record>
  absl::StatusOr<Record> Take() {
    Record record;
    WAVEKV_ASSIGN_OR_RETURN(const auto bytes, TakeBytes(1, sizeof record));
    std::memcpy(&record, bytes.data(), sizeof record);
    return record;
  }
  template <class Element>
  absl::StatusOr<std::vector<Element>> TakeAll(uint64_t count) {
    WAVEKV_ASSIGN_OR_RETURN(const auto bytes, TakeBytes(count, sizeof(Element)));
    std::vector<Element> elements(count);
    if (count > 0) std::memcpy(elements.data(), bytes.data(), bytes.size());
    return elements;
  }
  absl::StatusOr<std::string> TakeText(uint64_t count) {
    WAVEKV_ASSIGN_OR_RETURN(const auto bytes, TakeBytes(count, 1));
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  absl::Status CheckDone() const {
    if (rest_.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(rest_.size(), " of its ", size_, " bytes are too many"));
  }

 private:
  absl::StatusOr<std::span<const std::byte>> TakeBytes(uint64_t count, uint64_t each) {
    if (count > rest_.size() / each) {
      return absl::InvalidArgumentError(absl::StrCat("it has ", size_, " bytes, ", rest_.size(),
                                                     " of them for ", count, " elements of ", each,
                                                     " bytes"));
    }
    const std::span<const std::byte> taken = rest_.first(count * each);
    rest_ = rest_.subspan(taken.size());
    return taken;
  }

  const size_t size_;
  std::span<const std::byte> rest_;
};

WireSequence HeadOf(const TraceSequence& sequence) {
  const ModelShape& shape = sequence.shape;
  WireSequence head;
  head.layer_count = shape.layer_count;
  head.query_head_count = shape.query_head_count;
  head.kv_head_count = shape.kv_head_count;
  head.key_dim = shape.key_dim;
  head.value_dim = shape.value_dim;
  head.dtype = static_cast<uint32_t>(shape.dtype);
  head.softmax_scale = shape.softmax_scale;
  head.first_kv_head = sequence.first_kv_head;
  head.total_kv_head_count = sequence.total_kv_head_count;
  head.segment_tokens = sequence.segment_tokens;
  head.small_segment_tokens = sequence.small_segment_tokens;
  head.tokens_per_cluster = sequence.tokens_per_cluster;
  head.kmeans_iterations = sequence.kmeans_iterations;
  head.flags = (sequence.sketch ? kFlagSketch : 0) | (sequence.built ? kFlagBuilt : 0);
  head.max_tokens = sequence.max_tokens;
  head.sequence_id = sequence.sequence_id;
  head.generation = sequence.generation;
  head.began_unix_ms = sequence.began_unix_ms;
  head.budget = ToWire(sequence.budget);
  head.traced_layer_count = static_cast<uint32_t>(sequence.layers.size());
  head.layer_budget_count = static_cast<uint32_t>(sequence.layer_budgets.size());
  head.dense_layer_count = static_cast<uint32_t>(sequence.dense_layers.size());
  head.model_id_bytes = static_cast<uint32_t>(shape.model_id.size());
  head.label_bytes = static_cast<uint32_t>(sequence.label.size());
  head.daemon_version_bytes = static_cast<uint32_t>(sequence.daemon_version.size());
  return head;
}

absl::StatusOr<TraceSequence> SequenceOf(const WireSequence& head) {
  if (head.dtype < static_cast<uint32_t>(DType::kF32) ||
      head.dtype > static_cast<uint32_t>(DType::kBF16)) {
    return absl::InvalidArgumentError(
        absl::StrCat("dtype is ", head.dtype, ", expected F32 (1), F16 (2) or BF16 (3)"));
  }
  if ((head.flags & ~(kFlagSketch | kFlagBuilt)) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("unknown flags ", head.flags));
  }
  TraceSequence sequence;
  sequence.shape.layer_count = head.layer_count;
  sequence.shape.query_head_count = head.query_head_count;
  sequence.shape.kv_head_count = head.kv_head_count;
  sequence.shape.key_dim = head.key_dim;
  sequence.shape.value_dim = head.value_dim;
  sequence.shape.dtype = static_cast<DType>(head.dtype);
  sequence.shape.softmax_scale = head.softmax_scale;
  sequence.first_kv_head = head.first_kv_head;
  sequence.total_kv_head_count = head.total_kv_head_count;
  sequence.segment_tokens = head.segment_tokens;
  sequence.small_segment_tokens = head.small_segment_tokens;
  sequence.tokens_per_cluster = head.tokens_per_cluster;
  sequence.kmeans_iterations = head.kmeans_iterations;
  sequence.sketch = (head.flags & kFlagSketch) != 0;
  sequence.built = (head.flags & kFlagBuilt) != 0;
  sequence.max_tokens = head.max_tokens;
  sequence.sequence_id = head.sequence_id;
  sequence.generation = head.generation;
  sequence.began_unix_ms = head.began_unix_ms;
  sequence.budget = FromWire(head.budget);
  return sequence;
}

absl::StatusOr<TraceRecord> DecodeRows(const ModelShape& shape, PayloadReader& reader) {
  WAVEKV_ASSIGN_OR_RETURN(const WireRows head, reader.Take<WireRows>());
  if (head.origin < static_cast<uint32_t>(TraceRowsOrigin::kStored) ||
      head.origin > static_cast<uint32_t>(TraceRowsOrigin::kAppend)) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows of origin ", head.origin, ", expected 1 to 3"));
  }
  if (head.token_count > kTracePayloadBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("rows of ", head.token_count, " tokens in one record"));
  }
  TraceRows rows;
  rows.layer = head.layer;
  rows.origin = static_cast<TraceRowsOrigin>(head.origin);
  rows.generation = head.generation;
  rows.first_position = head.first_position;
  rows.token_count = head.token_count;
  const uint64_t head_rows = head.token_count * shape.kv_head_count;
  WAVEKV_ASSIGN_OR_RETURN(rows.keys, reader.TakeAll<std::byte>(head_rows * shape.key_bytes()));
  WAVEKV_ASSIGN_OR_RETURN(rows.values, reader.TakeAll<std::byte>(head_rows * shape.value_bytes()));
  return rows;
}

absl::StatusOr<TraceRecord> DecodeStep(const ModelShape& shape, PayloadReader& reader) {
  WAVEKV_ASSIGN_OR_RETURN(const WireStep head, reader.Take<WireStep>());
  if (head.verb < static_cast<uint32_t>(TraceVerb::kAttend) ||
      head.verb > static_cast<uint32_t>(TraceVerb::kEstimate)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a step of verb ", head.verb, ", expected 1 to 3"));
  }
  if ((head.flags & ~kFlagExact) != 0) {
    return absl::InvalidArgumentError(absl::StrCat("a step with unknown flags ", head.flags));
  }
  TraceStep step;
  step.layer = head.layer;
  step.verb = static_cast<TraceVerb>(head.verb);
  step.exact = (head.flags & kFlagExact) != 0;
  step.generation = head.generation;
  step.version = head.version;
  step.token_count = head.token_count;
  step.at_us = head.at_us;
  step.budget = FromWire(head.budget);
  const uint64_t heads = shape.query_head_count;
  WAVEKV_ASSIGN_OR_RETURN(step.queries, reader.TakeAll<float>(heads * shape.key_dim));
  if (step.verb != TraceVerb::kAttend) return step;
  WAVEKV_ASSIGN_OR_RETURN(step.out, reader.TakeAll<float>(heads * shape.value_dim));
  WAVEKV_ASSIGN_OR_RETURN(step.lse, reader.TakeAll<float>(heads));
  return step;
}

absl::StatusOr<TraceRecord> DecodeBody(uint32_t type, const ModelShape& shape,
                                       PayloadReader& reader) {
  switch (static_cast<TraceType>(type)) {
    case TraceType::kRows:
      return DecodeRows(shape, reader);
    case TraceType::kStep:
      return DecodeStep(shape, reader);
    case TraceType::kBuild: {
      WAVEKV_ASSIGN_OR_RETURN(const uint64_t generation, reader.Take<uint64_t>());
      return TraceBuild{generation};
    }
    case TraceType::kTruncate: {
      WAVEKV_ASSIGN_OR_RETURN(const WireTruncate head, reader.Take<WireTruncate>());
      return TraceTruncate{head.generation, head.token_count};
    }
    case TraceType::kEnd: {
      WAVEKV_ASSIGN_OR_RETURN(const WireEnd head, reader.Take<WireEnd>());
      return TraceEnd{EnumOf<TraceEndReason>(head.reason), head.step_count};
    }
    case TraceType::kSequence:
      return absl::InvalidArgumentError("a second sequence");
  }
  return absl::InvalidArgumentError(absl::StrCat("a record of the unknown type ", type));
}

// One overload for each kind of record that is not the first.
TraceType PutBody(const TraceRows& rows, PayloadWriter* writer) {
  writer->Put(WireRows{.layer = rows.layer,
                       .origin = static_cast<uint32_t>(rows.origin),
                       .generation = rows.generation,
                       .first_position = rows.first_position,
                       .token_count = rows.token_count});
  writer->PutAll(rows.keys);
  writer->PutAll(rows.values);
  return TraceType::kRows;
}

TraceType PutBody(const TraceStep& step, PayloadWriter* writer) {
  writer->Put(WireStep{.layer = step.layer,
                       .verb = static_cast<uint32_t>(step.verb),
                       .flags = step.exact ? kFlagExact : 0,
                       .generation = step.generation,
                       .version = step.version,
                       .token_count = step.token_count,
                       .at_us = step.at_us,
                       .budget = ToWire(step.budget)});
  writer->PutAll(step.queries);
  writer->PutAll(step.out);
  writer->PutAll(step.lse);
  return TraceType::kStep;
}

TraceType PutBody(const TraceBuild& build, PayloadWriter* writer) {
  writer->Put(build.generation);
  return TraceType::kBuild;
}

TraceType PutBody(const TraceTruncate& truncate, PayloadWriter* writer) {
  writer->Put(WireTruncate{truncate.generation, truncate.token_count});
  return TraceType::kTruncate;
}

TraceType PutBody(const TraceEnd& end, PayloadWriter* writer) {
  writer->Put(WireEnd{.reason = static_cast<uint32_t>(end.reason), .step_count = end.step_count});
  return TraceType::kEnd;
}

}  // namespace

absl::StatusOr<std::vector<std::byte>> EncodeTrace(const TraceSequence& sequence) {
  PayloadWriter writer;
  writer.Put(HeadOf(sequence));
  for (const TraceLayer& layer : sequence.layers) {
    writer.Put(WireTracedLayer{.layer = layer.layer, .token_count = layer.token_count});
  }
  for (const auto& [layer, budget] : sequence.layer_budgets) {
    writer.Put(WireLayerBudget{.layer = layer, .budget = ToWire(budget)});
  }
  writer.PutAll(sequence.dense_layers);
  writer.PutText(sequence.shape.model_id);
  writer.PutText(sequence.label);
  writer.PutText(sequence.daemon_version);
  return std::move(writer).Seal(TraceType::kSequence, 0);
}

absl::StatusOr<std::vector<std::byte>> EncodeTrace(const TraceRecord& record, uint64_t number) {
  PayloadWriter writer;
  const TraceType type =
      std::visit([&](const auto& held) { return PutBody(held, &writer); }, record);
  return std::move(writer).Seal(type, number);
}

absl::Status CheckTraceFrame(const TraceFrame& frame, uint64_t number) {
  if (Crc32c(std::as_bytes(std::span(&frame, 1)).first(kTraceFrameCrcBytes)) != frame.frame_crc) {
    return absl::InvalidArgumentError("the checksum of its frame is wrong");
  }
  if (frame.number != number) {
    return absl::InvalidArgumentError(absl::StrCat("its frame has the number ", frame.number));
  }
  if (frame.payload_bytes > kTracePayloadBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "it has ", frame.payload_bytes, " bytes, expected at most ", kTracePayloadBytesMax));
  }
  return absl::OkStatus();
}

absl::StatusOr<TraceFramed> TakeTraceRecord(std::span<const std::byte>* bytes, uint64_t number) {
  TraceFrame frame;
  if (bytes->size() < sizeof frame) {
    return absl::InvalidArgumentError(
        absl::StrCat("record ", number, ": ", bytes->size(), " bytes are no frame"));
  }
  std::memcpy(&frame, bytes->data(), sizeof frame);
  WAVEKV_RETURN_IF_ERROR(CheckTraceFrame(frame, number));
  *bytes = bytes->subspan(sizeof frame);
  if (bytes->size() < frame.payload_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("record ", number, ": it ends after ",
                                                   bytes->size(), " of ", frame.payload_bytes,
                                                   " bytes"));
  }
  const TraceFramed record = {frame.type, bytes->first(frame.payload_bytes)};
  *bytes = bytes->subspan(frame.payload_bytes);
  if (Crc32c(record.payload) != frame.payload_crc) {
    return absl::InvalidArgumentError(absl::StrCat("record ", number, ": its checksum is wrong"));
  }
  return record;
}

absl::StatusOr<TraceSequence> DecodeTraceSequence(std::span<const std::byte> payload) {
  PayloadReader reader(payload);
  WAVEKV_ASSIGN_OR_RETURN(const WireSequence head, reader.Take<WireSequence>());
  WAVEKV_ASSIGN_OR_RETURN(TraceSequence sequence, SequenceOf(head));
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<WireTracedLayer> layers,
                          reader.TakeAll<WireTracedLayer>(head.traced_layer_count));
  for (const WireTracedLayer& layer : layers) {
    sequence.layers.push_back({layer.layer, layer.token_count});
  }
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<WireLayerBudget> budgets,
                          reader.TakeAll<WireLayerBudget>(head.layer_budget_count));
  for (const WireLayerBudget& budget : budgets) {
    sequence.layer_budgets.emplace_back(budget.layer, FromWire(budget.budget));
  }
  WAVEKV_ASSIGN_OR_RETURN(sequence.dense_layers, reader.TakeAll<uint32_t>(head.dense_layer_count));
  WAVEKV_ASSIGN_OR_RETURN(sequence.shape.model_id, reader.TakeText(head.model_id_bytes));
  WAVEKV_ASSIGN_OR_RETURN(sequence.label, reader.TakeText(head.label_bytes));
  WAVEKV_ASSIGN_OR_RETURN(sequence.daemon_version, reader.TakeText(head.daemon_version_bytes));
  WAVEKV_RETURN_IF_ERROR(reader.CheckDone());
  return sequence;
}

absl::StatusOr<TraceRecord> DecodeTrace(uint32_t type, const ModelShape& shape,
                                        std::span<const std::byte> payload) {
  PayloadReader reader(payload);
  WAVEKV_ASSIGN_OR_RETURN(TraceRecord record, DecodeBody(type, shape, reader));
  WAVEKV_RETURN_IF_ERROR(reader.CheckDone());
  return record;
}

}  // namespace wavekv
