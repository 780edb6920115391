// Requests in a channel's arena, as bytes and as values. docs/formats.md has the tables.
//
// A decoder is given bytes that nobody else can write any more (a copy), believes nothing of them,
// and says InvalidArgument naming the field: with the words that the same mistake over gRPC gets.
// Views borrow from the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/dtype.h"

namespace wavekv::shm {

enum Verb : uint64_t { kInsert = 1, kQuery = 2, kEstimate = 3, kAttend = 4 };

enum class TensorLayout : uint8_t { kNHD = 1, kHND = 2 };

// A dense row-major tensor of at most kRequestRankMax axes. `data` may be left out by whoever
// writes the bytes later.
struct TensorRef {
  DType dtype = DType::kF32;
  TensorLayout layout = TensorLayout::kNHD;
  std::span<const int64_t> shape;
  std::span<const std::byte> data;
};
inline constexpr size_t kRequestRankMax = 4;

enum class BudgetRefKind : uint32_t { kRatio = 1, kClusters = 2, kCoverage = 3, kError = 4 };

struct BudgetRef {
  BudgetRefKind kind = BudgetRefKind::kRatio;
  double value = 0;
  double estimate_ratio = 1;
  uint32_t clusters_max = 0;
  uint32_t sketch_clusters = 0;
};

struct LayerQueryRequest {
  uint64_t sequence_id = 0;
  uint64_t generation = 0;
  uint32_t layer = 0;
  std::optional<BudgetRef> budget;
  TensorRef queries;  // [query_heads, key_dim]
};

struct QueryRequest {
  LayerQueryRequest query;
  bool inline_rows = false;
  uint64_t completed_step = 0;
};

struct AttendItemRequest {
  LayerQueryRequest query;
  std::optional<TensorRef> append_keys;    // [kv_heads, key_dim]
  std::optional<TensorRef> append_values;  // [kv_heads, value_dim]
  uint64_t append_position = 0;
  bool exact = false;
};

// One chunk of one sequence; the same as one message of gRPC's Insert stream.
struct InsertRequest {
  uint64_t sequence_id = 0;
  uint64_t generation = 0;
  uint64_t first_position = 0;
  std::span<const uint32_t> layers;
  TensorRef keys;    // [layers, tokens, kv_heads, key_dim], or HND
  TensorRef values;  // Likewise.
};

// Sizes of the encoded requests. Encode* want as many bytes, aligned to 8.
uint64_t AttendBytes(std::span<const AttendItemRequest> items);
void EncodeAttend(std::span<const AttendItemRequest> items, std::span<std::byte> target);
uint64_t QueryBytes(const QueryRequest& request);
void EncodeQuery(const QueryRequest& request, std::span<std::byte> target);
uint64_t EstimateBytes(const LayerQueryRequest& request);
void EncodeEstimate(const LayerQueryRequest& request, std::span<std::byte> target);

// Everything of an Insert but the rows, which the caller writes to `target` at the two offsets.
struct InsertPlaces {
  uint64_t keys_offset = 0;
  uint64_t values_offset = 0;
  uint64_t bytes = 0;
};
// By the shapes, whether the tensors have data or not.
InsertPlaces PlaceInsert(const InsertRequest& request);
void EncodeInsert(const InsertRequest& request, std::span<std::byte> target);

// How an Attend's item stands: readable, or why not. The others of its batch stand.
using AttendItems = std::vector<absl::StatusOr<AttendItemRequest>>;
// InvalidArgument: not 1 to `items_max` items. `items` is a buffer to be used again.
absl::Status DecodeAttend(std::span<const std::byte> bytes, uint32_t items_max, AttendItems* items);
absl::StatusOr<QueryRequest> DecodeQuery(std::span<const std::byte> bytes);
absl::StatusOr<LayerQueryRequest> DecodeEstimate(std::span<const std::byte> bytes);

// An Insert is not copied whole: only its head, up to the rows, is. The rows' places are checked,
// their contents are the client's to change until the answer.
inline constexpr uint64_t kInsertHeadBytesMax = 160 + 1024 * sizeof(uint32_t);
// `head` is a copy of the first min(kInsertHeadBytesMax, shared.size()) bytes of `shared`; views of
// the layers and shapes borrow from it, the rows from `shared`.
absl::StatusOr<InsertRequest> DecodeInsert(std::span<const std::byte> head,
                                           std::span<const std::byte> shared);

}  // namespace wavekv::shm
