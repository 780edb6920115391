// What a trace holds: one sequence's shape, what it stored, and what was done with it, in order.
// Plain values; docs/formats.md has the bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "storage/base/model_shape.h"

namespace wavekv {

inline constexpr size_t kTraceLabelBytesMax = 128;
inline constexpr size_t kTraceVersionBytesMax = 128;

enum class TraceBudgetKind : uint8_t { kRatio = 1, kClusters, kCoverage, kError };

// A retrieval budget; the fields mean what they mean in wavekv.v1.Budget.
struct TraceBudget {
  TraceBudgetKind kind = TraceBudgetKind::kRatio;
  double value = 0;
  uint32_t clusters_max = 0;
  double estimate_ratio = 1;
  uint32_t sketch_clusters = 0;

  friend bool operator==(const TraceBudget&, const TraceBudget&) = default;
};

// A layer that the trace holds.
struct TraceLayer {
  uint32_t layer = 0;
  uint64_t token_count = 0;  // Tokens it had when the recording began; rows of all come first.

  friend bool operator==(const TraceLayer&, const TraceLayer&) = default;
};

// The first record: what the sequence was made with, and what of it is in the trace.
struct TraceSequence {
  ModelShape shape;
  uint32_t first_kv_head = 0;
  uint32_t total_kv_head_count = 0;  // 0: all heads of the model.
  uint32_t segment_tokens = 0;
  uint32_t small_segment_tokens = 0;
  uint32_t tokens_per_cluster = 0;
  uint32_t kmeans_iterations = 0;
  bool sketch = true;
  TraceBudget budget;
  std::vector<std::pair<uint32_t, TraceBudget>> layer_budgets;  // (layer, budget)
  std::vector<uint32_t> dense_layers;
  uint64_t max_tokens = 0;
  std::string label;

  uint64_t sequence_id = 0;  // In the daemon that was recorded.
  uint64_t generation = 0;   // When the recording began.
  bool built = false;        // There had been a BuildIndex by then.
  uint64_t began_unix_ms = 0;
  std::string daemon_version;
  std::vector<TraceLayer> layers;  // Ascending by layer, at least one.

  friend bool operator==(const TraceSequence&, const TraceSequence&) = default;
};

// How rows came to be in the sequence.
enum class TraceRowsOrigin : uint8_t {
  kStored = 1,  // They were there when the recording began.
  kInsert,      // By Insert.
  kAppend,      // By the step of their layer that follows.
};

// K and V of consecutive positions of one layer, of the sequence's dtype. They follow the layer's
// rows so far without a gap.
struct TraceRows {
  uint32_t layer = 0;
  TraceRowsOrigin origin = TraceRowsOrigin::kStored;
  uint64_t generation = 0;
  uint64_t first_position = 0;
  uint64_t token_count = 0;       // At least 1.
  std::vector<std::byte> keys;    // [token_count, kv_heads, key_dim]
  std::vector<std::byte> values;  // [token_count, kv_heads, value_dim]

  friend bool operator==(const TraceRows&, const TraceRows&) = default;
};

enum class TraceVerb : uint8_t { kAttend = 1, kQuery, kEstimate };

// One layer's queries and, of an Attend, its answer. A step of an earlier generation than the trace
// is at was overtaken by a truncate between its reading and its recording.
struct TraceStep {
  uint32_t layer = 0;
  TraceVerb verb = TraceVerb::kAttend;
  bool exact = false;  // It attended over every token.
  uint64_t generation = 0;
  uint64_t version = 0;        // Of the index it attended over.
  uint64_t token_count = 0;    // Tokens it attended over.
  uint64_t at_us = 0;          // Since the recording began.
  TraceBudget budget;          // The one in force: the call's, the layer's or the sequence's.
  std::vector<float> queries;  // [query_heads, key_dim]
  std::vector<float> out;      // [query_heads, value_dim]; empty unless an Attend
  std::vector<float> lse;      // [query_heads], natural log; likewise

  friend bool operator==(const TraceStep&, const TraceStep&) = default;
};

// A BuildIndex over what the layers held at this place of the trace.
struct TraceBuild {
  uint64_t generation = 0;

  friend bool operator==(const TraceBuild&, const TraceBuild&) = default;
};

// Every layer was cut to its first token_count tokens.
struct TraceTruncate {
  uint64_t generation = 0;  // The new one.
  uint64_t token_count = 0;

  friend bool operator==(const TraceTruncate&, const TraceTruncate&) = default;
};

// Why a recording ended as it should.
enum class TraceEndReason : uint8_t {
  kSteps = 1,     // It has the number of steps that were asked for.
  kStopped,       // Who recorded it had enough: the time was over, or a signal.
  kDropped,       // The sequence was dropped, or ended with its lease.
  kDaemonStopped  // The daemon shut down.
};

std::string_view TraceEndReasonName(TraceEndReason reason);

// The last record of a whole trace.
struct TraceEnd {
  TraceEndReason reason = TraceEndReason::kStopped;
  uint64_t step_count = 0;  // Steps in the trace.

  friend bool operator==(const TraceEnd&, const TraceEnd&) = default;
};

using TraceRecord = std::variant<TraceRows, TraceStep, TraceBuild, TraceTruncate, TraceEnd>;

}  // namespace wavekv
