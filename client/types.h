// Values of the C++ SDK: plain structs, no wire format, no other room's types but dtypes and
// shapes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "storage/base/dtype.h"
#include "storage/base/model_shape.h"

namespace wavekv::client {

enum class Layout : uint8_t { kNHD, kHND };

// A borrowed tensor: row-major, dense. `data` must outlive the call it is passed to.
struct Tensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  const void* data = nullptr;
  Layout layout = Layout::kNHD;

  size_t bytes() const;  // Product of the shape times the element size.
};

inline constexpr uint32_t kSketchClustersMax = 4096;  // Of Budget.sketch_clusters.

// How many clusters the retrieval zone gets (docs/architecture.md, "Zones").
struct Budget {
  enum class Kind : uint8_t { kRatio, kClusters, kCoverage, kError };
  Kind kind = Kind::kRatio;
  double value = 0.005;
  uint32_t clusters_max = 0;    // Cap for coverage and error; 0: the daemon's default.
  double estimate_ratio = 1.0;  // Share of the other clusters that is estimated.
  // Of the estimated clusters the best, estimated token by token from their sketch; <= 4096.
  uint32_t sketch_clusters = 112;

  static Budget Ratio(double ratio) { return {Kind::kRatio, ratio}; }
  static Budget Clusters(uint32_t count) { return {Kind::kClusters, static_cast<double>(count)}; }
  static Budget Coverage(double share) { return {Kind::kCoverage, share}; }
  static Budget Error(double epsilon) { return {Kind::kError, epsilon}; }
  // The steady zone alone: nothing retrieved, nothing estimated.
  static Budget SteadyOnly() { return {Kind::kClusters, 0, 0, 0.0}; }
};

struct IndexOptions {
  uint32_t segment_tokens = 0;        // 0: the daemon's default, 8192.
  uint32_t small_segment_tokens = 0;  // 0: 1024.
  uint32_t tokens_per_cluster = 0;    // 0: 16.
  uint32_t kmeans_iterations = 0;     // 0: 10.
  bool sketch = true;  // Keep a 4-bit sketch of every token: about a quarter of its 16-bit size.
  std::optional<Budget> budget;
  std::vector<std::pair<uint32_t, Budget>> layer_budgets;
  std::vector<uint32_t> dense_layers;
};

struct SequenceOptions {
  ModelShape shape;
  uint32_t first_kv_head = 0;        // Tensor parallelism: this rank's heads.
  uint32_t total_kv_head_count = 0;  // 0: all heads are here.
  IndexOptions index;
  uint64_t max_tokens = 0;
  std::string label;
  bool attach_wave_buffer = false;
  float logit_soft_cap = 0;     // Refused by the daemon unless 0.
  uint32_t sliding_window = 0;  // Refused by the daemon unless 0.
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

struct Attention {
  std::vector<float> out;  // [query_heads, value_dim]
  std::vector<float> lse;  // [query_heads], natural log; -inf over nothing
  uint64_t generation = 0;
  uint64_t version = 0;
  uint64_t token_count = 0;
  StepCounters counters;
};

struct Estimation {
  std::vector<float> out;        // [query_heads, value_dim]
  std::vector<float> lse;        // [query_heads]
  std::vector<float> lse_lower;  // [query_heads] bound of the zone's true log mass
  std::vector<float> lse_upper;  // [query_heads]
  uint64_t generation = 0;
  uint64_t version = 0;
  StepCounters counters;
};

// A cluster of the retrieval zone.
struct ClusterRef {
  uint32_t segment_idx = 0;
  uint32_t cluster_idx = 0;  // In the segment.
  uint32_t size = 0;
  uint32_t first_block = 0;  // Of the head's segment; blocks are 8 tokens.
  float estimated_mass = 0;  // Natural log of its share of the group's estimated mass, summed.
};

// Rows in the tenant's wave buffer: [row_count, dim] of the sequence's dtype at each offset.
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
  std::vector<ClusterRef> retrieved;
  std::vector<StagedRows> staged;        // Steady rows first, then the retrieved clusters' blocks.
  std::vector<std::byte> inline_keys;    // [rows, key_dim] when asked for
  std::vector<std::byte> inline_values;  // [rows, value_dim]
  std::vector<uint64_t> inline_positions;
};

struct QueryResult {
  uint64_t generation = 0;
  uint64_t version = 0;
  uint64_t token_count = 0;
  uint64_t step = 0;
  std::vector<HeadZones> heads;
  Estimation estimation;
  StepCounters counters;
};

struct BuildProgress {
  uint64_t tokens_done = 0;
  uint64_t tokens_total = 0;
  bool done = false;
};

struct BuildResult {
  uint64_t generation = 0;
  uint64_t version = 0;
};

// Where a client looks for the daemon when nothing is said: $WAVEKV_ADDRESS, or else the daemon's
// own default, wavekv/wavekvd.sock in $XDG_RUNTIME_DIR or in /run.
std::string DefaultAddress();

struct ClientOptions {
  // "unix:/run/wavekv/wavekvd.sock" or "host:port"; empty: DefaultAddress().
  std::string address;
  std::string token;                                 // For TCP; empty on a UNIX socket.
  std::string client_name;                           // Shown to operators.
  std::chrono::milliseconds deadline{30000};         // Of one call, streams and builds excepted.
  std::chrono::milliseconds build_deadline{600000};  // Of BuildIndex and of one Insert call.
  std::chrono::milliseconds lease{0};                // 0: the daemon's default.
  // Insert, Query, Estimate and Attend over shared memory where the daemon offers it; false: over
  // gRPC, always.
  bool shared_memory = true;
};

// What the daemon said when the session attached last.
struct ClientInfo {
  std::string tenant;  // "uid:1000", or the name of the token or of --tenant_map.
  std::string daemon_version;
  uint64_t epoch = 0;              // Of this life of the daemon.
  uint64_t message_bytes_max = 0;  // Largest request or reply.
  uint64_t tenant_bytes_max = 0;   // Memory that the tenant's sequences may reserve.
  uint32_t batch_max = 0;          // Items of one Attend.
  bool has_wave_buffer = false;    // AttendStaged can work.
  // Whether calls go over shared memory now; if not, why not.
  bool shared_memory = false;
  std::string shared_memory_absent;
};

}  // namespace wavekv::client
