// What operators and dashboards read, and the few things they do: the library behind the `wavekv`
// command. An Admin attaches like any client and owns no sequences; it sees those of its tenant,
// or of all tenants when the daemon takes it for an administrator.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/types.h"

namespace wavekv::client {

struct TenantStats {
  std::string tenant;
  uint64_t bytes_max = 0;
  uint64_t reserved_bytes = 0;
  uint64_t payload_bytes = 0;
  uint64_t index_bytes = 0;
  uint32_t sequences = 0;
  uint32_t clients = 0;
};

struct WaveBufferStats {
  std::string device_uuid;
  std::string backend;
  bool connected = false;
  uint64_t bytes_max = 0;
  uint64_t bytes_used = 0;
  uint64_t cache_hit_blocks = 0;
  uint64_t cache_miss_blocks = 0;
  uint64_t admitted_blocks = 0;
  bool pinned = false;
};

// Of the sequences whose engines attend on the device.
struct ResidentStats {
  uint32_t sequences = 0;    // Attached now; the rest since start.
  uint64_t hit_blocks = 0;   // Blocks that steps asked for and found in the cache,
  uint64_t miss_blocks = 0;  // or not.
  uint64_t overflows = 0;    // Tokens that steps could not append: the ring was full.
  uint64_t violations = 0;   // Numbers found in regions that cannot be.
  uint64_t log_losses = 0;   // Rounds in which block uses were not heard of.
};

struct DaemonStats {
  std::string daemon_version;
  uint64_t epoch = 0;
  uint64_t uptime_ms = 0;
  uint64_t pool_bytes_max = 0;
  uint64_t pool_reserved_bytes = 0;
  uint64_t pool_payload_bytes = 0;    // Live K and V bytes.
  uint64_t pool_allocated_bytes = 0;  // What they occupy.
  uint64_t index_bytes = 0;
  uint64_t rss_bytes = 0;
  uint64_t memory_available_bytes = 0;
  uint64_t cgroup_limit_bytes = 0;  // 0: none.
  uint64_t memlock_limit_bytes = 0;
  uint32_t threads = 0;
  std::vector<TenantStats> tenants;
  std::vector<WaveBufferStats> wave_buffers;
  StepCounters counters;                  // Since start.
  std::map<std::string, uint64_t> calls;  // RPC name -> count.
  std::string isa;
  uint64_t build_queue = 0;  // Layers that wait for a thread to cluster their segments.
  std::string cgroup_version;
  uint32_t data_channels = 0;    // Clients that are served over shared memory.
  uint64_t huge_page_bytes = 0;  // Size of one; the host's reserved ones:
  uint64_t huge_pages_total = 0;
  uint64_t huge_pages_free = 0;
  std::string shmem_huge_pages;  // "never", "advise", ...: transparent ones for the pool.
  uint32_t numa_nodes = 0;
  uint32_t recordings = 0;  // Sequences being recorded, and what their recorders have not read.
  uint64_t recording_queued_bytes = 0;
  ResidentStats residents;
};

struct SequenceSummary {
  uint64_t id = 0;
  uint64_t generation = 0;
  std::string tenant;
  std::string label;
  std::string client_name;  // Of its owner; empty when nobody owns it.
  ModelShape shape;
  uint64_t token_count = 0;
  uint64_t max_tokens = 0;
  uint64_t clustered_tokens = 0;
  uint64_t version = 0;
  uint64_t reserved_bytes = 0;
  uint64_t payload_bytes = 0;
  uint64_t index_bytes = 0;
  uint64_t idle_ms = 0;
  uint64_t ttl_ms = 0;
  bool pinned = false;
  bool wave_buffer = false;
  bool attached = false;  // To a resident region.
  StepCounters counters;
};

// counts[i] values lie in [edges[i], edges[i + 1]); edges.size() == counts.size() + 1, or both are
// empty.
struct Histogram {
  std::vector<double> edges;
  std::vector<uint64_t> counts;
};

struct SegmentSummary {
  uint64_t first_position = 0;
  uint64_t token_count = 0;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  uint32_t cluster_count = 0;
  uint32_t singleton_count = 0;
  uint32_t size_max = 0;
  double radius_mean = 0;
  double radius_max = 0;
  uint64_t index_bytes = 0;
  uint64_t payload_bytes = 0;
  bool given_labels = false;  // Clustered by a client's labels (Sequence::GiveLabels).
};

struct IndexDescription {
  uint64_t generation = 0;
  uint64_t version = 0;
  uint64_t token_count = 0;    // Of the longest layer described.
  uint64_t steady_tokens = 0;  // Summed over the indexes described.
  uint32_t index_count = 0;    // One for each layer and KV head described.
  std::vector<SegmentSummary> segments;
  uint64_t segments_left_off = 0;  // The daemon lists a bounded number.
  Histogram sizes;                 // Tokens per cluster.
  Histogram radii;
  double imbalance = 0;  // Mean of size^2 over square of mean size; 1 is even.
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
  double expected_error =
      0;  // Of the output if it is estimated: mass times spread, over the group.
  double estimated_mass = 0;  // Shares of the group's mass, 0 ... 1.
  double true_mass = 0;
  std::string zone;                 // "retrieval", "sketch", "estimation" or "ignored".
  std::vector<uint64_t> positions;  // A bounded number of the tokens it holds.
};

struct Explanation {
  uint64_t generation = 0;
  uint64_t version = 0;
  std::vector<ExplainedCluster> clusters;
  uint64_t cluster_count = 0;
  uint64_t retrieval_count = 0;
  double steady_mass = 0;  // True shares of the whole attention mass, mean over the group.
  double retrieval_mass = 0;
  double estimation_mass = 0;
  std::string ranked_by;  // What orders the clusters: "expected error" or "estimated mass".
  std::string budget;     // In words.
};

struct ExplainOptions {
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  std::optional<Tensor>
      queries;  // [group, key_dim] or [query_heads, key_dim]; unset: the last seen.
  std::optional<Budget> budget;  // Unset: the sequence's.
  uint32_t top = 0;              // Clusters to list; 0: the daemon's default.
};

struct LayerRecall {
  uint32_t layer = 0;
  double mass_covered_mean = 0;  // True mass of steady and retrieval zones, over query heads.
  double mass_covered_min = 0;
  double rel_error_mean = 0;  // ||approx - exact|| / ||exact||
  double rel_error_max = 0;
  double kv_bytes_read_ratio = 0;
  bool sampled = false;  // False: the layer has seen no query yet.
};

struct RecallSample {
  uint64_t generation = 0;
  uint64_t version = 0;
  std::vector<LayerRecall> layers;
};

struct RecordOptions {
  std::vector<uint32_t> layers;  // Empty: all.
  uint64_t steps = 0;            // Ends once each of the layers has had so many; 0: no such end.
};

// Thread-safe. Errors as Session has them; an unknown sequence, or one of another tenant, is
// NotFound.
class Admin {
 public:
  static absl::StatusOr<std::unique_ptr<Admin>> Connect(ClientOptions options);
  ~Admin();
  Admin(const Admin&) = delete;
  Admin& operator=(const Admin&) = delete;

  absl::StatusOr<DaemonStats> GetStats();
  // All pages, in the order of their ids; at most `count_max`.
  absl::StatusOr<std::vector<SequenceSummary>> ListSequences(uint32_t count_max = 10000);
  // Unset layer or head: over all of them.
  absl::StatusOr<IndexDescription> DescribeIndex(uint64_t sequence_id,
                                                 std::optional<uint32_t> layer = std::nullopt,
                                                 std::optional<uint32_t> kv_head = std::nullopt);
  absl::StatusOr<Explanation> Explain(uint64_t sequence_id, const ExplainOptions& options);
  // Runs exact attention beside the approximation, for the last query that each layer has seen.
  // Empty `layers`: all.
  absl::StatusOr<RecallSample> SampleRecall(uint64_t sequence_id,
                                            std::span<const uint32_t> layers = {},
                                            const std::optional<Budget>& budget = std::nullopt);
  // `progress` is called from this thread.
  absl::StatusOr<BuildResult> BuildIndex(
      uint64_t sequence_id, const std::function<void(const BuildProgress&)>& progress = nullptr);
  absl::Status DropSequence(uint64_t sequence_id);
  // Records a sequence of the caller's own tenant: what it holds, then what happens to it, until it
  // has its steps, the sequence ends or the daemon shuts down, which the last record says, or
  // `stop` is asked for. `take` is called from this thread with whole records of a trace, one after
  // another, as they stand in a trace file (docs/formats.md); its error ends the call.
  // ResourceExhausted: `take` is too slow, there are too many recordings, or no memory for one.
  absl::Status RecordSequence(uint64_t sequence_id, const RecordOptions& options,
                              std::stop_token stop,
                              const std::function<absl::Status(std::string_view)>& take);

  ClientInfo info() const;

 private:
  struct Impl;
  explicit Admin(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace wavekv::client
