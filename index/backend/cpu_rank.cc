#include "index/backend/cpu_rank.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/backend/fetch_ahead.h"
#include "index/simd/query_codes.h"

namespace wavekv {
namespace {

// Times a clamped key spread this is infinite at worst, and then saturates: never NaN.
constexpr float kReachSquaredMax = 1e30f;

// How far ahead of their use codes are requested, and the clusters that are scored between two
// requests: whole panels.
constexpr size_t kAheadBytes = 8 << 10;
constexpr uint32_t kPieceClusters = 2 * kPanelClusters;

void ScoreCentroids(const simd::Kernels& kernels, HeadIndex index, const GroupQuery& query,
                    ClusterScores* scores) {
  thread_local simd::QueryCodes codes;
  codes.Assign(query.queries, query.key_dim);
  std::vector<float> bases(query.group_size), factors(query.group_size);
  for (uint32_t g = 0; g < query.group_size; ++g) {
    factors[g] = static_cast<float>(
        std::min<double>(double{query.scale} * codes.steps[g], std::numeric_limits<float>::max()));
  }
  FetchAhead summaries_ahead(index, 1, [](const SegmentHead* segment) {
    FetchPages(segment->key_codes.data(), segment->key_codes.size());
    for (const auto* summary : {&segment->key_scales, &segment->key_spreads, &segment->log_sizes,
                                &segment->value_spreads}) {
      FetchBytes(summary->data(), summary->size() * sizeof(float));
    }
  });
  FetchBytesAhead codes_ahead(
      index, kAheadBytes,
      [](const SegmentHead* segment) { return std::as_bytes(std::span(segment->key_codes)); },
      FetchBytes);
  float* logits = scores->logits.data();
  for (const SegmentHead* segment : index) {
    summaries_ahead.Next();
    kernels.dot_rows(DType::kF32, query.queries.data(), query.group_size, query.key_dim,
                     segment->key_mean.data(), 1, query.scale, bases.data(), 1);
    for (uint32_t first = 0; first < segment->cluster_count; first += kPieceClusters) {
      const uint32_t count = std::min(kPieceClusters, segment->cluster_count - first);
      const size_t code = KeyCodeCount(first, query.key_dim);
      codes_ahead.Next(KeyCodeCount(count, query.key_dim));
      kernels.dot_panels(codes, segment->key_codes.data() + code, count,
                         segment->key_scales.data() + first, bases.data(), factors.data(), logits,
                         scores->cluster_count);
      logits += count;
    }
  }
}

// Each head's factors that turn weights into shares of the clusters' mass and of the whole.
struct MassFactors {
  std::vector<float> share, rank;
};

// From the log masses, which become weights.
MassFactors WeighClusters(const simd::Kernels& kernels, HeadIndex index, const GroupQuery& query,
                          std::span<const float> steady_lse, ClusterScores* scores) {
  const uint32_t clusters = scores->cluster_count;
  MassFactors factors;
  for (uint32_t g = 0; g < query.group_size; ++g) {
    float* weights = scores->weights.data() + size_t{g} * clusters;
    const float top = scores->tops[g];
    double sum = 0;
    uint32_t first = 0;
    for (const SegmentHead* segment : index) {
      sum += kernels.exp_sum(weights + first, segment->cluster_count, top);
      first += segment->cluster_count;
    }
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

std::vector<float> ReachSquares(const simd::Kernels& kernels, HeadIndex index,
                                const GroupQuery& query) {
  std::vector<float> squares(query.queries.size()), reaches;
  for (size_t i = 0; i < squares.size(); ++i) {
    squares[i] = std::min(query.queries[i] * query.queries[i], kReachSquaredMax);
  }
  const double scale_squared = double{query.scale} * query.scale;
  reaches.reserve(index.size() * query.group_size);
  for (const SegmentHead* segment : index) {
    for (uint32_t g = 0; g < query.group_size; ++g) {
      const double seen = kernels.dot(squares.data() + size_t{g} * query.key_dim,
                                      segment->spread_shares.data(), query.key_dim);
      reaches.push_back(
          static_cast<float>(std::min<double>(scale_squared * seen, kReachSquaredMax)));
    }
  }
  return reaches;
}

void EstimateLogMasses(const simd::Kernels& kernels, HeadIndex index, uint32_t cluster_count,
                       std::span<const float> reach_squares, const float* logits, float* log_masses,
                       std::span<float> tops) {
  std::fill(tops.begin(), tops.end(), -std::numeric_limits<float>::infinity());
  size_t first = 0;
  for (const SegmentHead* segment : index) {
    kernels.estimate_log_masses(logits + first, cluster_count, tops.size(),
                                segment->key_spreads.data(), segment->log_sizes.data(),
                                reach_squares.data(), segment->cluster_count, log_masses + first,
                                tops.data());
    reach_squares = reach_squares.subspan(tops.size());
    first += segment->cluster_count;
  }
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
  const std::vector<float> reach_squares = ReachSquares(kernels, index, query);
  EstimateLogMasses(kernels, index, clusters, reach_squares, scores->logits.data(),
                    scores->weights.data(), scores->tops);
  const MassFactors masses = WeighClusters(kernels, index, query, steady_lse, scores);
  std::span<const float> reaches = reach_squares;
  uint32_t first = 0;
  for (const SegmentHead* segment : index) {
    kernels.rank_clusters({masses.share, masses.rank, reaches.first(query.group_size)},
                          scores->weights.data() + first, clusters, segment->key_spreads.data(),
                          segment->value_spreads.data(), segment->cluster_count,
                          scores->mass_share.data() + first, scores->rank.data() + first);
    reaches = reaches.subspan(query.group_size);
    first += segment->cluster_count;
  }
}

}  // namespace wavekv
