// Which clusters a step retrieves, estimates and ignores: pure host values and pure functions, so
// that the rules are tested without any backend.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "index/segment.h"

namespace wavekv {

enum class BudgetKind : uint8_t { kRatio, kClusters, kCoverage, kError };

inline constexpr double kDefaultRetrievalRatio = 0.005;
inline constexpr uint32_t kDefaultSketchClusters = 112;
// Of the clusters, what a step without sketches retrieves at least (UnsketchedRetrievalCount).
inline constexpr double kUnsketchedRatio = 0.014;
inline constexpr uint32_t kSketchClustersMax = 4096;

// How many clusters the retrieval zone of one KV head gets.
struct ZoneBudget {
  BudgetKind kind = BudgetKind::kRatio;
  // kRatio: fraction of the clusters, rounded up. kClusters: a count. kCoverage: share of the
  // estimated mass, steady zone excluded. kError: bound of |output - exact output| of every query
  // head, relative to the length of the KV head's longest value (see error_bound.h).
  double value = kDefaultRetrievalRatio;
  uint32_t clusters_max = 0;  // Cap for kCoverage and kError; 0: 1/8 of the clusters, rounded up.
  // Share of the not retrieved clusters that is estimated, best first, rounded up. 1 for kError:
  // no bound covers what is ignored.
  double estimate_ratio = 1.0;
  // Of what is estimated the best clusters, token by token from their sketch, if the index has
  // sketches; at most kSketchClustersMax. Not used by kError, whose bound is that of summaries.
  uint32_t sketch_clusters = kDefaultSketchClusters;
};

// InvalidArgument naming the field, what was found and what is allowed.
absl::Status ValidateBudget(const ZoneBudget& budget);

// Ranking of one head's clusters, numbered through the segments in order (a "flat" cluster index).
struct ClusterScores {
  uint32_t cluster_count = 0;
  uint32_t group_size = 0;
  std::vector<float> logits;  // [group_size, cluster_count] scale * q . stored centroid
  // Estimated mass of each cluster (see RankClusters): weights [group_size, cluster_count] in units
  // of exp(tops[g]), the largest about 1. tops [group_size]; -inf without clusters.
  std::vector<float> weights;
  std::vector<float> tops;
  // [cluster_count] sum over the group of each head's share of the clusters' estimated mass.
  std::vector<float> mass_share;
  // [cluster_count] what estimating the cluster is expected to do to the output (see RankClusters);
  // the larger the sooner it is retrieved. 0 for a cluster that its summary describes exactly.
  std::vector<float> rank;
  // [group_size] log of the head's whole mass, steady zone included, as estimated.
  std::vector<float> total_lse;
};

struct ZonePlan {
  std::vector<uint32_t> retrieved;  // Flat cluster indices, best first.
  // The estimation zone, flat cluster indices, ascending: what is estimated token by token, and
  // what is estimated from its summary.
  std::vector<uint32_t> sketched;
  std::vector<uint32_t> estimated;
  bool can_sketch = false;  // The index has sketches and the budget may use them.
  uint32_t ignored = 0;     // In no zone: estimate_ratio < 1.
  // Wanted for retrieval, estimated instead: beyond the cap of kCoverage, or moved later.
  uint32_t moved_to_estimation = 0;
  bool error_budget_met = false;     // kError only: the bound came under the budget ...
  bool error_budget_capped = false;  // ... or the cap was hit first.
};

// Moves retrieved clusters from index `keep` on to the estimation zone (they did not fit
// somewhere), to its sketched part if there is one, and counts them. An error budget that was met
// no longer is.
void MoveTailToEstimation(uint32_t keep, ZonePlan* plan);

}  // namespace wavekv
