#include "index/zone/select_zones.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
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

// Sorts by rank, best first, then by index: the rank's bits, turned so that a larger one is a
// smaller number, above the index.
uint64_t OrderKey(float rank, uint32_t cluster) {
  const auto bits = std::bit_cast<uint32_t>(rank + 0.0f);  // -0 ranks as 0.
  const uint32_t ascending = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (uint64_t{~ascending} << 32) | cluster;
}

// A rank that about `count` of the clusters reach, rather more than less, from a sample of them.
float GuessThreshold(const std::vector<float>& rank, uint32_t count) {
  constexpr size_t kSamples = 1024;
  const size_t stride = std::max<size_t>(1, rank.size() / kSamples);
  std::vector<float> sample;
  sample.reserve(rank.size() / stride + 1);
  for (size_t c = 0; c < rank.size(); c += stride) sample.push_back(rank[c]);
  // The sample's own scatter: three deviations of a count, and a few.
  const double share = static_cast<double>(count) / static_cast<double>(stride);
  const auto place = static_cast<size_t>(share + 3 * std::sqrt(share) + 4);
  if (place >= sample.size()) return -std::numeric_limits<float>::infinity();
  std::nth_element(sample.begin(), sample.begin() + static_cast<ptrdiff_t>(place), sample.end(),
                   std::greater<>());
  return sample[place];
}

// The best `count` clusters, sorted. Only those that reach a guessed threshold are sorted.
std::vector<uint32_t> BestClusters(const std::vector<float>& rank, uint32_t count) {
  const auto reaching = [&](float threshold) {
    std::vector<uint64_t> keys;
    keys.reserve(2 * size_t{count});
    for (uint32_t c = 0; c < rank.size(); ++c) {
      if (rank[c] >= threshold) keys.push_back(OrderKey(rank[c], c));
    }
    return keys;
  };
  std::vector<uint64_t> keys = reaching(GuessThreshold(rank, count));
  if (keys.size() < count) keys = reaching(-std::numeric_limits<float>::infinity());
  const auto end = keys.begin() + count;
  if (end != keys.end()) std::nth_element(keys.begin(), end, keys.end());
  std::sort(keys.begin(), end);
  std::vector<uint32_t> best;
  best.reserve(count);
  for (auto key = keys.begin(); key != end; ++key) best.push_back(static_cast<uint32_t>(*key));
  return best;
}

// The order of clusters, best first, found as far as it is asked for.
class RankOrder {
 public:
  explicit RankOrder(const std::vector<float>& rank) : rank_(rank) {}

  // The best `count` clusters, sorted; valid until the next call.
  std::span<const uint32_t> Best(uint32_t count) {
    if (count > best_.size()) best_ = BestClusters(rank_, count);
    return std::span<const uint32_t>(best_).first(count);
  }

  // The best `count` clusters behind the best `skipped`, by index.
  std::vector<uint32_t> NextByIndex(uint32_t skipped, uint32_t count) {
    if (count == 0) return {};
    if (skipped + count == rank_.size()) return RestByIndex(skipped);
    const std::span<const uint32_t> next = Best(skipped + count).subspan(skipped);
    std::vector<uint32_t> by_index(next.begin(), next.end());
    std::sort(by_index.begin(), by_index.end());
    return by_index;
  }

 private:
  // All but the best `skipped`.
  std::vector<uint32_t> RestByIndex(uint32_t skipped) {
    std::vector<uint8_t> chosen(rank_.size(), 1);
    for (const uint32_t c : Best(skipped)) chosen[c] = 0;
    std::vector<uint32_t> rest(rank_.size());
    size_t count = 0;
    for (uint32_t c = 0; c < chosen.size(); ++c) {
      rest[count] = c;
      count += chosen[c];
    }
    rest.resize(count);
    return rest;
  }

  const std::vector<float>& rank_;
  std::vector<uint32_t> best_;
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
    case BudgetKind::kClusters:
      count = FixedRetrievalCount(budget, clusters);
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
  const uint32_t estimated = CeilOfShare(budget.estimate_ratio, clusters - count);
  plan.can_sketch = budget.kind != BudgetKind::kError && HasSketches(index);
  const uint32_t sketched = plan.can_sketch ? std::min(budget.sketch_clusters, estimated) : 0;
  const std::span<const uint32_t> best = order.Best(count + sketched).first(count);
  plan.retrieved.assign(best.begin(), best.end());
  plan.sketched = order.NextByIndex(count, sketched);
  plan.estimated = order.NextByIndex(count + sketched, estimated - sketched);
  plan.ignored = clusters - count - estimated;
  return plan;
}

uint32_t FixedRetrievalCount(const ZoneBudget& budget, uint32_t clusters) {
  WAVEKV_CHECK(budget.kind == BudgetKind::kRatio || budget.kind == BudgetKind::kClusters,
               "a budget that asks for a number of clusters");
  if (budget.kind == BudgetKind::kRatio) return CeilOfShare(budget.value, clusters);
  return static_cast<uint32_t>(std::min<double>(budget.value, clusters));
}

uint32_t UnsketchedRetrievalCount(const ZoneBudget& budget, bool sketch, uint32_t clusters) {
  uint32_t count = FixedRetrievalCount(budget, clusters);
  if (sketch && budget.sketch_clusters > 0) {
    const uint32_t instead = budget.sketch_clusters + budget.sketch_clusters / 7;
    count = std::max({count, instead, CeilOfShare(kUnsketchedRatio, clusters)});
  }
  return std::min(count, clusters);
}

}  // namespace wavekv
