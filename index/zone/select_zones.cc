#include "index/zone/select_zones.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "index/zone/error_bound.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// A product that is whole but for its rounding must not be rounded up to the next count.
uint32_t CeilOfShare(double share, uint32_t count) {
  const double exact = share * count;
  return std::min(count, static_cast<uint32_t>(std::ceil(exact * (1 - 1e-12))));
}

// The order of clusters, best first, found as far as it is asked for.
class RankOrder {
 public:
  explicit RankOrder(const std::vector<float>& rank) : rank_(rank), order_(rank.size()) {
    for (uint32_t c = 0; c < order_.size(); ++c) order_[c] = c;
  }

  // The best `count` clusters, sorted; valid until the next call.
  std::span<const uint32_t> Best(uint32_t count) {
    const auto better = [this](uint32_t a, uint32_t b) {
      return rank_[a] != rank_[b] ? rank_[a] > rank_[b] : a < b;
    };
    if (count > sorted_) {
      const auto first = order_.begin() + sorted_, last = order_.begin() + count;
      if (last != order_.end()) std::nth_element(first, last, order_.end(), better);
      std::sort(first, last, better);
      sorted_ = count;
    }
    return std::span<const uint32_t>(order_).first(count);
  }

  // The best `count` clusters behind the best `skipped`, by index.
  std::vector<uint32_t> NextByIndex(uint32_t skipped, uint32_t count) {
    const auto clusters = static_cast<uint32_t>(order_.size());
    // When that is all the rest, its order does not matter.
    if (skipped + count < clusters) Best(skipped + count);
    std::vector<bool> chosen(clusters, false);
    for (uint32_t i = skipped; i < skipped + count; ++i) chosen[order_[i]] = true;
    std::vector<uint32_t> next;
    next.reserve(count);
    for (uint32_t c = 0; c < clusters; ++c) {
      if (chosen[c]) next.push_back(c);
    }
    return next;
  }

 private:
  const std::vector<float>& rank_;
  std::vector<uint32_t> order_;
  uint32_t sorted_ = 0;  // The first ones are in place.
};

// Retrieved clusters that hold `share` of the estimated mass; `order` is that of mass_share.
uint32_t CountForCoverage(const ClusterScores& scores, double share, uint32_t count_max,
                          RankOrder* order, uint32_t* moved) {
  double total = 0;
  for (const float mass : scores.mass_share) total += mass;
  // Summed in another order the same numbers may fall short of their total by a rounding.
  const double wanted = share * total * (1 - 1e-12);
  double held = 0;
  uint32_t count = 0;
  for (uint32_t limit = count_max;; limit = scores.cluster_count) {
    const std::span<const uint32_t> best = order->Best(limit);
    while (count < limit && held < wanted) held += scores.mass_share[best[count++]];
    if (held >= wanted || limit == scores.cluster_count) break;
  }
  *moved = count > count_max ? count - count_max : 0;
  return std::min(count, count_max);
}

bool HasSketches(HeadIndex index) {
  return std::none_of(index.begin(), index.end(),
                      [](const SegmentHead* segment) { return segment->sketch.empty(); });
}

}  // namespace

ZonePlan SelectZones(HeadIndex index, const ClusterScores& scores, std::span<const double> reaches,
                     std::span<const float> steady_lse, const ZoneBudget& budget) {
  WAVEKV_CHECK(scores.rank.size() == scores.cluster_count &&
                   scores.mass_share.size() == scores.cluster_count,
               "one rank and one share for each cluster");
  const uint32_t clusters = scores.cluster_count;
  const uint32_t count_max = budget.clusters_max == 0 ? CeilOfShare(1.0 / 8, clusters)
                                                      : std::min(budget.clusters_max, clusters);
  ZonePlan plan;
  RankOrder order(budget.kind == BudgetKind::kCoverage ? scores.mass_share : scores.rank);
  uint32_t count = 0;
  switch (budget.kind) {
    case BudgetKind::kRatio:
      count = CeilOfShare(budget.value, clusters);
      break;
    case BudgetKind::kClusters:
      count = static_cast<uint32_t>(std::min<double>(budget.value, clusters));
      break;
    case BudgetKind::kCoverage:
      count = CountForCoverage(scores, budget.value, count_max, &order, &plan.moved_to_estimation);
      break;
    case BudgetKind::kError: {
      const std::vector<double> bounds =
          BoundErrors(index, scores, reaches, steady_lse, order.Best(count_max));
      const auto met = std::find_if(bounds.begin(), bounds.end(),
                                    [&](double bound) { return bound <= budget.value; });
      plan.error_budget_met = met != bounds.end();
      plan.error_budget_capped = !plan.error_budget_met;
      count = plan.error_budget_met ? static_cast<uint32_t>(met - bounds.begin()) : count_max;
      break;
    }
  }
  const std::span<const uint32_t> best = order.Best(count);
  plan.retrieved.assign(best.begin(), best.end());
  const uint32_t estimated = CeilOfShare(budget.estimate_ratio, clusters - count);
  plan.can_sketch = budget.kind != BudgetKind::kError && HasSketches(index);
  const uint32_t sketched = plan.can_sketch ? std::min(budget.sketch_clusters, estimated) : 0;
  plan.sketched = order.NextByIndex(count, sketched);
  plan.estimated = order.NextByIndex(count + sketched, estimated - sketched);
  plan.ignored = clusters - count - estimated;
  return plan;
}

}  // namespace wavekv
