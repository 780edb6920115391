#include "index/backend/cpu_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/simd/query_codes.h"

namespace wavekv {
namespace {

// Times a clamped key spread this is infinite at worst, and then saturates: never NaN.
constexpr double kReachSquaredMax = 1e30;

// scale^2 * sum of q_j^2 * spread_shares_j: the variance of the logits for each unit of key spread.
float ReachSquared(const SegmentHead& segment, const GroupQuery& query, uint32_t g) {
  const float* q = query.queries.data() + size_t{g} * query.key_dim;
  double seen = 0;
  for (uint32_t j = 0; j < query.key_dim; ++j) {
    seen += double{q[j]} * q[j] * segment.spread_shares[j];
  }
  return static_cast<float>(std::min(double{query.scale} * query.scale * seen, kReachSquaredMax));
}

void ScoreCentroids(const simd::Kernels& kernels, HeadIndex index, const GroupQuery& query,
                    ClusterScores* scores) {
  thread_local simd::QueryCodes codes;
  codes.Assign(query.queries, query.key_dim);
  std::vector<float> bases(query.group_size), factors(query.group_size);
  for (uint32_t g = 0; g < query.group_size; ++g) {
    factors[g] = static_cast<float>(
        std::min<double>(double{query.scale} * codes.steps[g], std::numeric_limits<float>::max()));
  }
  uint32_t first = 0;
  for (const SegmentHead* segment : index) {
    kernels.dot_rows(DType::kF32, query.queries.data(), query.group_size, query.key_dim,
                     segment->key_mean.data(), 1, query.scale, bases.data(), 1);
    kernels.dot_panels(codes, segment->key_codes.data(), segment->cluster_count,
                       segment->key_scales.data(), bases.data(), factors.data(),
                       scores->logits.data() + first, scores->cluster_count);
    first += segment->cluster_count;
  }
}

// Each head's factors that turn weights into shares of the clusters' mass and of the whole.
struct MassFactors {
  std::vector<float> share, rank;
};

MassFactors WeighClusters(const simd::Kernels& kernels, HeadIndex index, const GroupQuery& query,
                          std::span<const float> steady_lse, ClusterScores* scores) {
  const uint32_t clusters = scores->cluster_count;
  MassFactors factors;
  for (uint32_t g = 0; g < query.group_size; ++g) {
    float* weights = scores->weights.data() + size_t{g} * clusters;
    const float top = EstimateLogMasses(
        kernels, index, query, g,
        std::span<const float>(scores->logits).subspan(size_t{g} * clusters, clusters), weights);
    double sum = 0;
    uint32_t first = 0;
    for (const SegmentHead* segment : index) {
      sum += kernels.exp_sum(weights + first, segment->cluster_count, top);
      first += segment->cluster_count;
    }
    scores->tops[g] = top;
    if (!(sum > 0)) {
      factors.share.push_back(0);
      factors.rank.push_back(0);
      continue;
    }
    const double clusters_lse = top + std::log(sum);
    // Of the head's whole mass the clusters hold 1 / whole.
    const double whole = 1 + std::exp(steady_lse[g] - clusters_lse);
    factors.share.push_back(static_cast<float>(1 / sum));
    factors.rank.push_back(static_cast<float>(1 / (sum * whole)));
    scores->total_lse[g] =
        std::isinf(whole) ? steady_lse[g] : static_cast<float>(clusters_lse + std::log(whole));
  }
  return factors;
}

}  // namespace

float EstimateLogMasses(const simd::Kernels& kernels, HeadIndex index, const GroupQuery& query,
                        uint32_t g, std::span<const float> logits, float* log_masses) {
  float top = -std::numeric_limits<float>::infinity();
  uint32_t first = 0;
  for (const SegmentHead* segment : index) {
    const float largest = kernels.estimate_log_masses(
        logits.data() + first, segment->key_spreads.data(), segment->log_sizes.data(),
        ReachSquared(*segment, query, g), segment->cluster_count, log_masses + first);
    top = std::max(top, largest);
    first += segment->cluster_count;
  }
  return top;
}

void RankOnCpu(const simd::Kernels& kernels, HeadIndex index, const GroupQuery& query,
               std::span<const float> steady_lse, ClusterScores* scores) {
  const uint32_t clusters = ClusterCount(index);
  scores->cluster_count = clusters;
  scores->group_size = query.group_size;
  scores->logits.resize(size_t{query.group_size} * clusters);
  scores->weights.resize(size_t{query.group_size} * clusters);
  scores->tops.resize(query.group_size);
  scores->total_lse.assign(steady_lse.begin(), steady_lse.end());
  scores->mass_share.resize(clusters);
  scores->rank.resize(clusters);
  ScoreCentroids(kernels, index, query, scores);
  const MassFactors masses = WeighClusters(kernels, index, query, steady_lse, scores);
  std::vector<float> reach_squares(query.group_size);
  uint32_t first = 0;
  for (const SegmentHead* segment : index) {
    for (uint32_t g = 0; g < query.group_size; ++g) {
      reach_squares[g] = ReachSquared(*segment, query, g);
    }
    kernels.rank_clusters({masses.share, masses.rank, reach_squares},
                          scores->weights.data() + first, clusters, segment->key_spreads.data(),
                          segment->value_spreads.data(), segment->cluster_count,
                          scores->mass_share.data() + first, scores->rank.data() + first);
    first += segment->cluster_count;
  }
}

}  // namespace wavekv
