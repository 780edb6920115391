// The narrow waist: what the engine asks of a processor, few verbs, tensors as views.
//
// The CPU backend (index/backend/cpu_backend.h) is complete: it is the product without a GPU and
// the oracle for every other backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "index/segment.h"
#include "index/zone/zone_plan.h"
#include "storage/base/dtype.h"

namespace wavekv {

struct BackendCaps {
  std::string name;  // "cpu"
  std::string isa;   // What really runs: "scalar", "avx2", "avx512", ...
};

// The query heads that share one KV head.
struct GroupQuery {
  std::span<const float> queries;  // [group_size, key_dim], finite
  uint32_t group_size = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  DType payload_dtype = DType::kBF16;
  float scale = 0;
};

// Attention over some set of tokens: normalised output and natural-log mass per query head.
// Over nothing: out = 0, lse = -inf.
struct PartialAttention {
  std::vector<float> out;  // [group_size, value_dim]
  std::vector<float> lse;  // [group_size]
};

// A part of the estimation zone, with bounds of its true log mass where they were asked for.
struct EstimatedAttention {
  PartialAttention attention;
  std::vector<float> lse_lower;  // [group_size]
  std::vector<float> lse_upper;  // [group_size]
  uint64_t bytes_read = 0;       // Value means, sketches, rows: beyond what ranking reads.
};

struct ClusterOptions {
  uint32_t tokens_per_cluster = 16;
  uint32_t iterations = 10;
  // Keys whose squared distance exceeds the spread of their cluster by far_key_excess times the
  // mean spread get clusters of their own, the farthest first, up to far_cluster_ratio_max clusters
  // for each token (index/cluster/far_keys.h, docs/decisions/003-outliers.md).
  double far_key_excess = 0.6;
  double far_cluster_ratio_max = 0.02;
  bool sketch = true;  // Make a TokenSketch.
  // Called, where set, between pieces of a millisecond or two of work, in the thread that clusters;
  // may block. It has no part in the result.
  std::function<void()> pause;
};

// How many clusters k-means looks for in a segment.
uint32_t ClusterCountFor(uint32_t token_count, uint32_t tokens_per_cluster);

// One head's tokens of a segment in order of position.
struct ClusterInput {
  uint64_t first_position = 0;
  uint32_t token_count = 0;
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  DType dtype = DType::kBF16;
  const std::byte* keys = nullptr;    // [token_count, key_dim], finite
  const std::byte* values = nullptr;  // [token_count, value_dim], finite
  // [token_count] each token's cluster, in place of k-means
  // (docs/decisions/016-index-built-on-the-gpu.md); empty: clustered here. Any numbers do: they
  // decide how good the clusters are, and nothing else.
  std::span<const uint16_t> labels;
};

// Thread-safe: every verb may be called from several threads at once. No verb keeps a reference
// to its arguments. Bad arguments are the engine's bug (CHECK); a Status is for what can fail at
// run time (no memory, device lost).
class ComputeBackend {
 public:
  virtual ~ComputeBackend() = default;

  virtual BackendCaps Caps() const = 0;

  // Clusters a segment and writes its payload sorted by cluster to keys_out [token_count, key_dim]
  // and values_out [token_count, value_dim]. Fills everything of the result but uid and
  // payload_owner. Deterministic: same input and options, same bits, on any number of threads.
  virtual absl::StatusOr<SegmentHead> ClusterSegment(const ClusterInput& input,
                                                     const ClusterOptions& options,
                                                     std::byte* keys_out,
                                                     std::byte* values_out) = 0;

  // Scores every cluster of `index` for the group. `steady_lse` [group_size] is the log mass of the
  // steady zone, -inf when it is empty: a head whose mass lies there has less to gain.
  //
  // The estimated mass of a cluster is size * exp(score + gain), the gain being what the scatter of
  // the logits adds: v / 4 for v, their variance, less where the cluster has too few tokens for
  // that (simd::Kernels::estimate_log_masses). v is scale^2 times the key spread of the cluster,
  // seen along the query with the segment's share of spread in each dim.
  //
  // The rank of a cluster is the expected error of the output when the cluster is estimated: its
  // estimated share of the head's whole mass, times the deviation of its tokens' weights about
  // their mean, times that of their values; summed over the group. The weights' deviation is that
  // of exp(N(0, v)) in units of its root mean square, sqrt(1 - exp(-v)). A share's gain is 3 v / 8
  // here, whatever the size: the estimate is of what is likely, the rank of what would hurt, one
  // token far above the others (simd::Kernels::rank_clusters).
  virtual absl::Status RankClusters(HeadIndex index, const GroupQuery& query,
                                    std::span<const float> steady_lse, ClusterScores* scores) = 0;

  // Chooses the zones. `steady_lse` as above.
  virtual absl::StatusOr<ZonePlan> SelectZones(HeadIndex index, const GroupQuery& query,
                                               const ClusterScores& scores,
                                               std::span<const float> steady_lse,
                                               const ZoneBudget& budget) = 0;

  // Exact attention over rows.
  virtual absl::Status AttendRows(std::span<const RowRun> rows, const GroupQuery& query,
                                  PartialAttention* result) = 0;

  // Exact attention over whole clusters (flat indices).
  virtual absl::Status AttendClusters(HeadIndex index, std::span<const uint32_t> clusters,
                                      const GroupQuery& query, PartialAttention* result) = 0;

  // Clusters estimated token by token from their sketch (flat indices, ascending, in segments that
  // have one; scores of the same query), with bounds when `bounds`. A token whose weight is a
  // negligible share of every head's mass counts with its cluster's mean value; one that holds a
  // good share of some head's is read exactly.
  virtual absl::Status SketchClusters(HeadIndex index, std::span<const uint32_t> clusters,
                                      const GroupQuery& query, const ClusterScores& scores,
                                      bool bounds, EstimatedAttention* result) = 0;

  // Clusters estimated from their summaries (flat indices, ascending, scores of the same query),
  // with bounds when `bounds`. Value means that hold together at most kUnreadShareMax of each
  // head's mass of the clusters may be left unread: the segment's mean value stands for them.
  virtual absl::Status EstimateClusters(HeadIndex index, std::span<const uint32_t> clusters,
                                        const GroupQuery& query, const ClusterScores& scores,
                                        bool bounds, EstimatedAttention* result) = 0;
};

// Merges b into a by log-sum-exp; the empty attention is the identity.
void MergePartial(const PartialAttention& b, PartialAttention* a);

// Merges part b of the estimation zone into part a, bounds included; both have bounds or neither.
void MergeEstimated(const EstimatedAttention& b, EstimatedAttention* a);

// The complete CPU backend.
std::unique_ptr<ComputeBackend> CreateCpuBackend();

// Rows [first, first + count) of `segment`.
RowRun RowsOf(const SegmentHead& segment, size_t first, uint32_t count);
// The rows of flat cluster `cluster` of `index`.
RowRun ClusterRows(HeadIndex index, uint32_t cluster);
// Number of clusters in all segments.
uint32_t ClusterCount(HeadIndex index);
// Splits a flat cluster index into (segment, cluster in the segment).
struct ClusterAddress {
  uint32_t segment_idx = 0;
  uint32_t cluster_idx = 0;
};
ClusterAddress LocateCluster(HeadIndex index, uint32_t cluster);

}  // namespace wavekv
