// What goes into and comes out of the engine: plain values and views, no wire format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "index/zone/zone_plan.h"
#include "storage/base/ids.h"
#include "storage/base/model_shape.h"

namespace wavekv {

enum class Layout : uint8_t { kNHD, kHND };

struct IndexConfig {
  uint32_t segment_tokens = 8192;
  uint32_t small_segment_tokens = 1024;
  uint32_t tokens_per_cluster = 16;
  uint32_t kmeans_iterations = 10;
  bool sketch = true;  // Keep a 4-bit sketch of every clustered token (index/token_sketch.h).
  ZoneBudget budget;
  std::vector<std::pair<uint32_t, ZoneBudget>> layer_budgets;  // (layer, budget)
  std::vector<uint32_t> dense_layers;
};

inline constexpr size_t kLabelBytesMax = 128;

struct SequenceSpec {
  ModelShape shape;
  uint32_t first_kv_head = 0;
  uint32_t total_kv_head_count = 0;  // 0: shape.kv_head_count
  IndexConfig index;
  uint64_t max_tokens = 0;
  std::string label;  // At most kLabelBytesMax.
  bool attach_wave_buffer = false;
};

struct SequenceRef {
  SequenceId id;
  Generation generation;  // 0: any (reads only).
};

// A borrowed tensor: row-major, dense, `data` holds exactly the product of shape elements.
struct TensorView {
  DType dtype = DType::kF32;
  std::span<const int64_t> shape;
  Layout layout = Layout::kNHD;
  std::span<const std::byte> data;
};

struct InsertChunk {
  SequenceRef sequence;
  uint64_t first_position = 0;
  std::span<const uint32_t> layers;
  TensorView keys;  // [layers, tokens, kv_heads, key_dim]; HND: [layers, kv_heads, tokens, key_dim]
  TensorView values;  // Likewise.
};

struct InsertOutcome {
  Generation generation;
  uint64_t token_count = 0;  // Positions that every layer holds.
};

// A segment that the daemon will cut, and how many clusters its k-means would look for.
struct PlannedSegment {
  uint64_t first_position = 0;
  uint32_t token_count = 0;
  uint32_t cluster_count = 0;
};

struct IndexPlan {
  Generation generation;
  std::vector<PlannedSegment> segments;  // Ascending.
};

// Labels for a segment that is not cut yet.
struct LabelRange {
  uint64_t first_position = 0;
  uint32_t token_count = 0;
  // [kv_heads, token_count] of 16 bits, little endian: each token's cluster, below the
  // cluster_count of a planned segment of as many tokens.
  std::span<const std::byte> labels;
};

struct LabelOutcome {
  Generation generation;
  uint32_t kept_count = 0;  // Of the segments: the others fit no cut.
};

// What steps have done, summed over KV heads: a token or cluster counts once for each head.
struct StepCounters {
  uint64_t steady_tokens = 0;        // Attended exactly, in the steady zone.
  uint64_t retrieved_clusters = 0;   // Attended exactly, in the retrieval zone,
  uint64_t retrieved_tokens = 0;     // and the tokens in them.
  uint64_t estimated_clusters = 0;   // In the estimation zone,
  uint64_t sketched_clusters = 0;    // and those of them that their sketch stood in for.
  uint64_t ignored_clusters = 0;     // In no zone: estimate_ratio < 1.
  uint64_t moved_to_estimation = 0;  // Wanted for retrieval, over a limit, estimated.
  uint64_t kv_bytes_read = 0;        // Rows, centroids, value means and the rest of the index.
  uint64_t kv_bytes_full = 0;        // What exact attention would have read.
  uint64_t cache_hit_blocks = 0;     // Blocks of retrieved clusters, found in the block cache
  uint64_t cache_miss_blocks = 0;    // or not.
  uint64_t error_budget_met = 0;     // KV heads whose error budget was met
  uint64_t error_budget_capped = 0;  // or hit its cap first.

  StepCounters& operator+=(const StepCounters& other);
};

struct LayerQuery {
  SequenceRef sequence;
  uint32_t layer = 0;
  TensorView queries;  // [query_heads, key_dim]
  std::optional<ZoneBudget> budget;
};

struct AttendStep {
  LayerQuery query;
  std::optional<TensorView> append_keys;    // [kv_heads, key_dim]
  std::optional<TensorView> append_values;  // [kv_heads, value_dim]
  uint64_t append_position = 0;
  bool exact = false;
};

struct AttendOutcome {
  absl::Status status;  // Of this item; the fields below hold when it is OK.
  Generation generation;
  uint64_t version = 0;
  uint64_t token_count = 0;
  std::vector<float> out;  // [query_heads, value_dim]; without elements where there is a sink.
  std::vector<float> lse;  // [query_heads]; likewise.
  StepCounters counters;
};

// Where the answers of an Attend go when its caller has places for them: memory that others may
// write and read meanwhile, so that nothing is read back from it.
class AnswerSink {
 public:
  // For one step: out [query_heads, value_dim] f32 and lse [query_heads] f32, of any alignment.
  // Null: there is no room, and nothing is written.
  struct Place {
    std::byte* out = nullptr;
    std::byte* lse = nullptr;
  };

  virtual ~AnswerSink() = default;
  // Called in Attend's own thread, once for each step that comes as far as its attention. Until
  // Attend returns, the place is written from any thread, each byte at most once; what it holds is
  // the answer if the step's outcome is OK.
  virtual Place PlaceOf(size_t step_idx, uint32_t query_heads, uint32_t value_dim) = 0;
};

struct EstimateOutcome {
  Generation generation;
  uint64_t version = 0;
  std::vector<float> out;        // [query_heads, value_dim]
  std::vector<float> lse;        // [query_heads]
  std::vector<float> lse_lower;  // [query_heads]
  std::vector<float> lse_upper;  // [query_heads]
  StepCounters counters;
};

struct RetrievedCluster {
  uint32_t segment_idx = 0;
  uint32_t cluster_idx = 0;  // In the segment.
  uint32_t size = 0;
  uint32_t first_block = 0;  // Of the head's segment; blocks are kBlockTokens tokens.
  float estimated_mass = 0;  // Natural log of its share of the group's estimated mass, summed.
};

struct StagedRows {
  uint64_t key_offset = 0;
  uint64_t value_offset = 0;
  uint32_t row_count = 0;
  bool cache_hit = false;
};

// The zones of one KV head: its steady tokens, then the clusters retrieved, best first.
struct HeadZones {
  uint32_t kv_head = 0;
  uint64_t steady_tokens = 0;
  std::vector<RetrievedCluster> retrieved;
  std::vector<StagedRows> staged;        // Their rows in the wave buffer, when there is one.
  std::vector<std::byte> inline_keys;    // [rows, key_dim], when asked for
  std::vector<std::byte> inline_values;  // [rows, value_dim]
  std::vector<uint64_t> inline_positions;
};

// What the HeadZones of one KV head will hold at most.
struct HeadExtent {
  uint64_t retrieved = 0;
  uint64_t staged = 0;
  uint64_t inline_rows = 0;
};

struct QueryOptions {
  bool inline_rows = false;
  uint64_t completed_step = 0;
  // Asked, if there is one, before anything is staged, counted or recorded: an answer that its
  // caller has no room for is refused while nothing has happened. The Query ends with its error.
  std::function<absl::Status(const ModelShape& shape, std::span<const HeadExtent> heads)> admit;
};

struct QueryOutcome {
  Generation generation;
  uint64_t version = 0;
  uint64_t token_count = 0;
  uint64_t step = 0;
  std::vector<HeadZones> heads;
  EstimateOutcome estimation;
  StepCounters counters;
};

struct SequenceStatus {
  SequenceId id;
  Generation generation;
  TenantId tenant;
  ClientId owner;
  std::string label;
  ModelShape shape;
  uint64_t token_count = 0;
  uint64_t max_tokens = 0;
  uint64_t clustered_tokens = 0;  // Of the layer with the fewest.
  uint64_t version = 0;
  uint64_t reserved_bytes = 0;
  uint64_t payload_bytes = 0;
  uint64_t index_bytes = 0;
  uint64_t idle_ms = 0;
  bool pinned = false;
  uint64_t ttl_ms = 0;
  bool wave_buffer = false;
  bool attached = false;  // To a resident region.
  StepCounters counters;
};

struct Histogram {
  std::vector<double> edges;     // bins + 1
  std::vector<uint64_t> counts;  // bins
};

// One segment of one layer and KV head.
struct SegmentStatus {
  uint64_t first_position = 0;
  uint64_t token_count = 0;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  uint32_t cluster_count = 0;
  uint32_t singleton_count = 0;  // Clusters of one token.
  uint64_t index_bytes = 0;
  uint64_t payload_bytes = 0;  // K and V.
  uint32_t size_max = 0;       // Tokens of the largest cluster.
  bool given_labels = false;   // By a client, in place of k-means here.
  double radius_mean = 0;      // Over clusters.
  double radius_max = 0;
};

struct IndexDescription {
  Generation generation;
  uint64_t version = 0;
  uint64_t token_count = 0;    // Of the longest layer described.
  uint64_t steady_tokens = 0;  // Summed over the indexes described.
  uint32_t index_count = 0;    // One for each layer and KV head described.
  std::vector<SegmentStatus> segments;
  uint64_t segments_left_off = 0;
  Histogram sizes;
  Histogram radii;
  double imbalance = 0;
  uint64_t cluster_count = 0;
  uint64_t index_bytes = 0;
  uint64_t payload_bytes = 0;
  uint64_t pool_bytes = 0;
  bool building = false;
};

struct ExplainedCluster {
  uint32_t rank = 0;
  uint32_t segment_idx = 0;
  uint32_t cluster_idx = 0;
  uint32_t size = 0;
  double radius = 0;
  double logit_max = 0;
  double estimated_mass = 0;
  double expected_error = 0;  // ClusterScores::rank
  double true_mass = 0;
  std::string zone;
  std::vector<uint64_t> positions;
};

struct Explanation {
  Generation generation;
  uint64_t version = 0;
  std::vector<ExplainedCluster> clusters;
  uint64_t cluster_count = 0;
  uint64_t retrieval_count = 0;
  double steady_mass = 0;
  double retrieval_mass = 0;
  double estimation_mass = 0;
  std::string ranked_by;  // "expected error" or "estimated mass"
  std::string budget;
};

struct LayerRecall {
  uint32_t layer = 0;
  double mass_covered_mean = 0;
  double mass_covered_min = 0;
  double rel_error_mean = 0;
  double rel_error_max = 0;
  double kv_bytes_read_ratio = 0;
  bool sampled = false;
};

struct RecallSample {
  Generation generation;
  uint64_t version = 0;
  std::vector<LayerRecall> layers;
};

}  // namespace wavekv
