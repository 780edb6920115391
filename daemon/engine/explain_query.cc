#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "daemon/engine/head_step.h"
#include "daemon/engine/inspection.h"
#include "daemon/engine/layer_step.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Mean over the group of exp(part - whole); a part of nothing has no mass.
double MeanShare(const std::vector<float>& part_lse, const std::vector<float>& whole_lse) {
  double sum = 0;
  for (size_t head = 0; head < part_lse.size(); ++head) {
    if (std::isinf(part_lse[head])) continue;
    sum += std::exp(double{part_lse[head]} - double{whole_lse[head]});
  }
  return sum / static_cast<double>(part_lse.size());
}

// Exact attention over some clusters of the head; over none, the empty one.
absl::StatusOr<PartialAttention> AttendSome(ComputeBackend* backend, const HeadStep& step,
                                            std::span<const uint32_t> clusters) {
  PartialAttention result = EmptyAttention(step.query().group_size, step.query().value_dim);
  if (clusters.empty()) return result;
  WAVEKV_RETURN_IF_ERROR(backend->AttendClusters(step.index(), clusters, step.query(), &result));
  return result;
}

std::vector<uint32_t> AllClusters(const HeadStep& step) {
  std::vector<uint32_t> clusters(ClusterCount(step.index()));
  std::iota(clusters.begin(), clusters.end(), 0u);
  return clusters;
}

absl::StatusOr<ExplainedCluster> ExplainCluster(ComputeBackend* backend, const HeadStep& step,
                                                uint32_t cluster,
                                                const std::vector<float>& clustered_lse) {
  const ClusterScores& scores = step.scores();
  const ClusterAddress address = LocateCluster(step.index(), cluster);
  const SegmentHead& segment = *step.index()[address.segment_idx];
  ExplainedCluster explained;
  explained.segment_idx = address.segment_idx;
  explained.cluster_idx = address.cluster_idx;
  explained.size = segment.sizes[address.cluster_idx];
  explained.radius = segment.radii[address.cluster_idx];
  explained.logit_max = -std::numeric_limits<double>::infinity();
  for (uint32_t head = 0; head < scores.group_size; ++head) {
    explained.logit_max = std::max<double>(
        explained.logit_max, scores.logits[size_t{head} * scores.cluster_count + cluster]);
  }
  explained.expected_error = scores.rank[cluster];
  explained.estimated_mass = scores.mass_share[cluster] / scores.group_size;
  WAVEKV_ASSIGN_OR_RETURN(const PartialAttention own,
                          AttendSome(backend, step, std::span(&cluster, 1)));
  explained.true_mass = MeanShare(own.lse, clustered_lse);
  const std::vector<uint32_t>& retrieved = step.zones().retrieved;
  const std::vector<uint32_t>& sketched = step.zones().sketched;
  const std::vector<uint32_t>& estimated = step.zones().estimated;
  if (std::find(retrieved.begin(), retrieved.end(), cluster) != retrieved.end()) {
    explained.zone = "retrieval";
  } else if (std::binary_search(sketched.begin(), sketched.end(), cluster)) {
    explained.zone = "sketch";
  } else if (std::binary_search(estimated.begin(), estimated.end(), cluster)) {
    explained.zone = "estimation";
  } else {
    explained.zone = "ignored";
  }
  const uint32_t row_end =
      std::min<uint32_t>(segment.first_row[address.cluster_idx + 1],
                         segment.first_row[address.cluster_idx] + kPositionsListedMax);
  for (uint32_t row = segment.first_row[address.cluster_idx]; row < row_end; ++row) {
    explained.positions.push_back(segment.first_position + segment.row_to_offset[row]);
  }
  return explained;
}

}  // namespace

std::string BudgetText(const ZoneBudget& budget) {
  std::string text;
  switch (budget.kind) {
    case BudgetKind::kRatio:
      text = absl::StrFormat("ratio: %.3g %% of the clusters", budget.value * 100);
      break;
    case BudgetKind::kClusters:
      text = absl::StrFormat("clusters: %.0f", budget.value);
      break;
    case BudgetKind::kCoverage:
      text =
          absl::StrFormat("coverage: the fewest clusters that hold %.3g %% of the estimated mass",
                          budget.value * 100);
      break;
    case BudgetKind::kError:
      text = absl::StrFormat("error: until the bound is under %.3g", budget.value);
      break;
  }
  if (budget.kind == BudgetKind::kCoverage || budget.kind == BudgetKind::kError) {
    absl::StrAppend(&text, ", at most ",
                    budget.clusters_max == 0 ? "1/8 of the clusters"
                                             : absl::StrCat(budget.clusters_max, " clusters"));
  }
  absl::StrAppendFormat(&text, "; %.3g %% of the others estimated", budget.estimate_ratio * 100);
  if (budget.sketch_clusters > 0 && budget.kind != BudgetKind::kError) {
    absl::StrAppend(&text, ", the best ", budget.sketch_clusters, " from their sketch");
  }
  return text;
}

absl::StatusOr<Explanation> ExplainHead(ComputeBackend* backend, const LayerSnapshot& snapshot,
                                        uint32_t kv_head, std::span<const float> queries,
                                        const ZoneBudget& budget, uint32_t top) {
  HeadStep step(backend, snapshot, kv_head, queries);
  WAVEKV_RETURN_IF_ERROR(step.AttendSteady());
  WAVEKV_RETURN_IF_ERROR(step.PlanZones(budget));
  WAVEKV_RETURN_IF_ERROR(step.AttendRetrieved());
  std::vector<uint32_t> clusters = AllClusters(step);
  WAVEKV_ASSIGN_OR_RETURN(const PartialAttention clustered, AttendSome(backend, step, clusters));
  std::vector<uint32_t> estimation_zone = step.zones().estimated;
  estimation_zone.insert(estimation_zone.end(), step.zones().sketched.begin(),
                         step.zones().sketched.end());
  WAVEKV_ASSIGN_OR_RETURN(const PartialAttention estimated,
                          AttendSome(backend, step, estimation_zone));
  PartialAttention whole = step.Steady();
  MergePartial(clustered, &whole);

  Explanation explanation;
  explanation.generation = snapshot.generation;
  explanation.version = snapshot.version->number();
  explanation.cluster_count = clusters.size();
  explanation.retrieval_count = step.zones().retrieved.size();
  explanation.steady_mass = MeanShare(step.Steady().lse, whole.lse);
  explanation.retrieval_mass = MeanShare(step.Retrieved().lse, whole.lse);
  explanation.estimation_mass = MeanShare(estimated.lse, whole.lse);
  explanation.budget = BudgetText(budget);

  const bool by_mass = budget.kind == BudgetKind::kCoverage;
  explanation.ranked_by = by_mass ? "estimated mass" : "expected error";
  const std::vector<float>& rank = by_mass ? step.scores().mass_share : step.scores().rank;
  const size_t listed =
      std::min<size_t>(top == 0 ? kClustersExplainedDefault : top, clusters.size());
  std::partial_sort(
      clusters.begin(), clusters.begin() + static_cast<ptrdiff_t>(listed), clusters.end(),
      [&](uint32_t a, uint32_t b) { return rank[a] != rank[b] ? rank[a] > rank[b] : a < b; });
  for (size_t i = 0; i < listed; ++i) {
    WAVEKV_ASSIGN_OR_RETURN(ExplainedCluster explained,
                            ExplainCluster(backend, step, clusters[i], clustered.lse));
    explained.rank = static_cast<uint32_t>(i);
    explanation.clusters.push_back(std::move(explained));
  }
  return explanation;
}

absl::StatusOr<LayerRecall> RecallOfLayer(ComputeBackend* backend, ThreadPool* pool, uint32_t layer,
                                          const LayerSnapshot& snapshot,
                                          const QueryVectors& queries, const ZoneBudget& budget) {
  LayerStep approximate(backend, snapshot, queries, budget);
  LayerStep exact(backend, snapshot, queries, budget);
  WAVEKV_RETURN_IF_ERROR(ForEachHead(pool, approximate.head_count(), [&](uint32_t head) {
    WAVEKV_RETURN_IF_ERROR(approximate.Attend(head, /*exact=*/false));
    return exact.Attend(head, /*exact=*/true);
  }));
  LayerRecall recall;
  recall.layer = layer;
  recall.sampled = true;
  recall.mass_covered_min = 1;
  const uint32_t value_dim = snapshot.shape->value_dim;
  for (uint32_t kv_head = 0; kv_head < approximate.head_count(); ++kv_head) {
    const HeadStep& step = approximate.head(kv_head);
    const PartialAttention answer = step.Answer();
    const PartialAttention truth = exact.head(kv_head).Answer();
    PartialAttention covered = step.Steady();
    MergePartial(step.Retrieved(), &covered);
    for (uint32_t head = 0; head < step.query().group_size; ++head) {
      const bool nothing = std::isinf(truth.lse[head]);
      const double mass =
          nothing ? 1 : std::exp(double{covered.lse[head]} - double{truth.lse[head]});
      double error = 0;
      double norm = 0;
      for (uint32_t i = head * value_dim; i < (head + 1) * value_dim; ++i) {
        error += std::pow(double{answer.out[i]} - double{truth.out[i]}, 2);
        norm += std::pow(double{truth.out[i]}, 2);
      }
      const double rel_error = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
      recall.mass_covered_mean += std::min(mass, 1.0);
      recall.mass_covered_min = std::min(recall.mass_covered_min, mass);
      recall.rel_error_mean += rel_error;
      recall.rel_error_max = std::max(recall.rel_error_max, rel_error);
    }
  }
  const double heads = snapshot.shape->query_head_count;
  recall.mass_covered_mean /= heads;
  recall.rel_error_mean /= heads;
  const StepCounters counters = approximate.Counters();
  recall.kv_bytes_read_ratio = counters.kv_bytes_full == 0
                                   ? 0
                                   : static_cast<double>(counters.kv_bytes_read) /
                                         static_cast<double>(counters.kv_bytes_full);
  return recall;
}

}  // namespace wavekv
