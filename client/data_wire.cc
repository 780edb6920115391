#include "client/data_wire.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/shm/replies.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

shm::BudgetRefKind ToRef(Budget::Kind kind) {
  switch (kind) {
    case Budget::Kind::kRatio:
      return shm::BudgetRefKind::kRatio;
    case Budget::Kind::kClusters:
      return shm::BudgetRefKind::kClusters;
    case Budget::Kind::kCoverage:
      return shm::BudgetRefKind::kCoverage;
    case Budget::Kind::kError:
      return shm::BudgetRefKind::kError;
  }
  return shm::BudgetRefKind::kRatio;
}

absl::Status BadReply(absl::string_view why) {
  return absl::InternalError(absl::StrCat("the daemon's reply is malformed: ", why));
}

StepCounters FromWire(const shm::WireCounters& counters) {
  return {.steady_tokens = counters.steady_tokens,
          .retrieved_clusters = counters.retrieved_clusters,
          .retrieved_tokens = counters.retrieved_tokens,
          .estimated_clusters = counters.estimated_clusters,
          .sketched_clusters = counters.sketched_clusters,
          .ignored_clusters = counters.ignored_clusters,
          .moved_to_estimation = counters.moved_to_estimation,
          .kv_bytes_read = counters.kv_bytes_read,
          .kv_bytes_full = counters.kv_bytes_full,
          .cache_hit_blocks = counters.cache_hit_blocks,
          .cache_miss_blocks = counters.cache_miss_blocks,
          .error_budget_met = counters.error_budget_met,
          .error_budget_capped = counters.error_budget_capped};
}

// A run of whole elements, of which there are as many as its bytes make.
template <class Element>
absl::StatusOr<std::vector<Element>> ReadRun(const shm::ReplyReader& reader,
                                             const shm::WireRun& run, absl::string_view name) {
  WAVEKV_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, reader.Run(run));
  std::vector<Element> elements(bytes.size() / sizeof(Element));
  WAVEKV_RETURN_IF_ERROR(reader.Copy(run, elements.size(), sizeof(Element), elements.data(), name));
  return elements;
}

absl::Status ReadFloats(const shm::ReplyReader& reader, const shm::WireRun& run, size_t count,
                        absl::string_view name, std::vector<float>* target) {
  const auto* const bytes = reader.Find(run, count * sizeof(float));
  if (bytes == nullptr) {
    return BadReply(absl::StrCat(name, " has ", run.bytes, " bytes at ", run.offset, ", expected ",
                                 count * sizeof(float)));
  }
  const auto* const begin = reinterpret_cast<const float*>(bytes);
  target->assign(begin, begin + count);
  return absl::OkStatus();
}

absl::StatusOr<Attention> ReadResult(const shm::ReplyReader& reader,
                                     const shm::WireAttendResult& result, const ModelShape& shape) {
  if (result.code != 0) {
    WAVEKV_ASSIGN_OR_RETURN(const std::span<const std::byte> text, reader.Run(result.text));
    const bool known = result.code <= static_cast<uint64_t>(absl::StatusCode::kUnauthenticated);
    return absl::Status(
        known ? static_cast<absl::StatusCode>(result.code) : absl::StatusCode::kUnknown,
        absl::string_view(reinterpret_cast<const char*>(text.data()), text.size()));
  }
  Attention attention;
  const size_t heads = shape.query_head_count;
  WAVEKV_RETURN_IF_ERROR(
      ReadFloats(reader, result.out, heads * shape.value_dim, "out", &attention.out));
  WAVEKV_RETURN_IF_ERROR(ReadFloats(reader, result.lse, heads, "lse", &attention.lse));
  attention.generation = result.generation;
  attention.version = result.version;
  attention.token_count = result.token_count;
  attention.counters = FromWire(result.counters);
  return attention;
}

absl::StatusOr<Estimation> ReadEstimation(const shm::ReplyReader& reader,
                                          const shm::WireEstimateReply& reply,
                                          const ModelShape& shape) {
  Estimation estimation;
  const size_t heads = shape.query_head_count;
  WAVEKV_RETURN_IF_ERROR(
      ReadFloats(reader, reply.out, heads * shape.value_dim, "out", &estimation.out));
  WAVEKV_RETURN_IF_ERROR(ReadFloats(reader, reply.lse, heads, "lse", &estimation.lse));
  WAVEKV_RETURN_IF_ERROR(
      ReadFloats(reader, reply.lse_lower, heads, "lse_lower", &estimation.lse_lower));
  WAVEKV_RETURN_IF_ERROR(
      ReadFloats(reader, reply.lse_upper, heads, "lse_upper", &estimation.lse_upper));
  estimation.generation = reply.generation;
  estimation.version = reply.version;
  estimation.counters = FromWire(reply.counters);
  return estimation;
}

absl::StatusOr<HeadZones> ReadHead(const shm::ReplyReader& reader, const shm::WireHeadZones& wire,
                                   const ModelShape& shape) {
  if (wire.kv_head >= shape.kv_head_count) {
    return BadReply(absl::StrCat("KV head ", wire.kv_head, " of ", shape.kv_head_count));
  }
  HeadZones head;
  head.kv_head = static_cast<uint32_t>(wire.kv_head);
  head.steady_tokens = wire.steady_tokens;
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<shm::WireCluster> clusters,
                          ReadRun<shm::WireCluster>(reader, wire.retrieved, "retrieved"));
  uint64_t rows = head.steady_tokens;
  for (const shm::WireCluster& cluster : clusters) {
    rows += cluster.size;
    head.retrieved.push_back({.segment_idx = cluster.segment_idx,
                              .cluster_idx = cluster.cluster_idx,
                              .size = cluster.size,
                              .first_block = cluster.first_block,
                              .estimated_mass = cluster.estimated_mass});
  }
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<shm::WireStagedRows> staged,
                          ReadRun<shm::WireStagedRows>(reader, wire.staged, "staged"));
  uint64_t staged_rows = 0;
  for (const shm::WireStagedRows& run : staged) {
    staged_rows += run.row_count;
    head.staged.push_back({.key_offset = run.key_offset,
                           .value_offset = run.value_offset,
                           .row_count = run.row_count,
                           .cache_hit = run.cache_hit != 0});
  }
  if (!staged.empty() && staged_rows != rows) {
    return BadReply(absl::StrCat("KV head ", head.kv_head, ": ", staged_rows,
                                 " rows staged, expected ", rows,
                                 " of the steady zone and the retrieved clusters"));
  }
  WAVEKV_ASSIGN_OR_RETURN(head.inline_positions,
                          ReadRun<uint64_t>(reader, wire.inline_positions, "inline_positions"));
  if (head.inline_positions.empty()) return head;
  if (head.inline_positions.size() != rows) {
    return BadReply(absl::StrCat("inline_positions: expected ", rows, ", found ",
                                 head.inline_positions.size()));
  }
  WAVEKV_ASSIGN_OR_RETURN(head.inline_keys,
                          ReadRun<std::byte>(reader, wire.inline_keys, "inline_keys"));
  WAVEKV_ASSIGN_OR_RETURN(head.inline_values,
                          ReadRun<std::byte>(reader, wire.inline_values, "inline_values"));
  if (head.inline_keys.size() != rows * shape.key_bytes() ||
      head.inline_values.size() != rows * shape.value_bytes()) {
    return BadReply(absl::StrCat("inline rows of ", head.inline_keys.size(), " and ",
                                 head.inline_values.size(), " bytes, expected ", rows, " rows"));
  }
  return head;
}

}  // namespace

shm::TensorRef DescribeRef(const Tensor& tensor, std::span<const int64_t> shape) {
  return {
      .dtype = tensor.dtype,
      .layout = tensor.layout == Layout::kNHD ? shm::TensorLayout::kNHD : shm::TensorLayout::kHND,
      .shape = shape,
      .data = {}};
}

shm::TensorRef ToRef(const Tensor& tensor) {
  shm::TensorRef ref = DescribeRef(tensor, tensor.shape);
  ref.data = {static_cast<const std::byte*>(tensor.data), tensor.bytes()};
  return ref;
}

std::optional<shm::TensorRef> ToRef(const std::optional<Tensor>& tensor) {
  if (!tensor.has_value()) return std::nullopt;
  return ToRef(*tensor);
}

shm::BudgetRef ToRef(const Budget& budget) {
  return {.kind = ToRef(budget.kind),
          .value = budget.value,
          .estimate_ratio = budget.estimate_ratio,
          .clusters_max = budget.clusters_max,
          .sketch_clusters = budget.sketch_clusters};
}

std::optional<shm::BudgetRef> ToRef(const std::optional<Budget>& budget) {
  if (!budget.has_value()) return std::nullopt;
  return ToRef(*budget);
}

absl::Status ReadAttendReply(std::span<const std::byte> bytes, size_t item_count,
                             absl::FunctionRef<const ModelShape&(size_t)> shape_of,
                             absl::FunctionRef<void(size_t, absl::StatusOr<Attention>)> take) {
  const shm::ReplyReader reader(bytes);
  WAVEKV_ASSIGN_OR_RETURN(const auto reply, reader.Get<shm::WireAttendReply>(0));
  if (reply.result_count != item_count) {
    return BadReply(absl::StrCat(reply.result_count, " results for ", item_count, " items"));
  }
  for (size_t i = 0; i < item_count; ++i) {
    WAVEKV_ASSIGN_OR_RETURN(
        const auto result,
        reader.Get<shm::WireAttendResult>(sizeof reply + i * sizeof(shm::WireAttendResult)));
    take(i, ReadResult(reader, result, shape_of(i)));
  }
  return absl::OkStatus();
}

absl::StatusOr<Estimation> ReadEstimateReply(std::span<const std::byte> bytes,
                                             const ModelShape& shape) {
  const shm::ReplyReader reader(bytes);
  WAVEKV_ASSIGN_OR_RETURN(const auto reply, reader.Get<shm::WireEstimateReply>(0));
  return ReadEstimation(reader, reply, shape);
}

absl::StatusOr<QueryResult> ReadQueryReply(std::span<const std::byte> bytes,
                                           const ModelShape& shape) {
  const shm::ReplyReader reader(bytes);
  WAVEKV_ASSIGN_OR_RETURN(const auto reply, reader.Get<shm::WireQueryReply>(0));
  if (reply.head_count != shape.kv_head_count) {
    return BadReply(absl::StrCat(reply.head_count, " KV heads, expected ", shape.kv_head_count));
  }
  QueryResult result;
  result.generation = reply.generation;
  result.version = reply.version;
  result.token_count = reply.token_count;
  result.step = reply.step;
  result.heads.reserve(shape.kv_head_count);
  std::vector<bool> seen(shape.kv_head_count, false);
  for (uint64_t i = 0; i < reply.head_count; ++i) {
    WAVEKV_ASSIGN_OR_RETURN(const auto wire, reader.Get<shm::WireHeadZones>(
                                                 sizeof reply + i * sizeof(shm::WireHeadZones)));
    WAVEKV_ASSIGN_OR_RETURN(HeadZones head, ReadHead(reader, wire, shape));
    if (seen[head.kv_head]) return BadReply(absl::StrCat("KV head ", head.kv_head, " twice"));
    seen[head.kv_head] = true;
    result.heads.push_back(std::move(head));
  }
  WAVEKV_ASSIGN_OR_RETURN(result.estimation, ReadEstimation(reader, reply.estimation, shape));
  result.counters = FromWire(reply.counters);
  return result;
}

absl::StatusOr<uint64_t> ReadInsertReply(std::span<const std::byte> bytes) {
  WAVEKV_ASSIGN_OR_RETURN(const auto reply, shm::ReplyReader(bytes).Get<shm::WireInsertReply>(0));
  return reply.generation;
}

}  // namespace wavekv::client
