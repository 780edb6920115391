#include "index/backend/cpu_estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/backend/softmax_accumulator.h"
#include "index/zone/cluster_mass.h"
#include "index/zone/round_outwards.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr size_t kSumChunk = 512;

// log(sum of exp(terms)).
double LogSumExp(const simd::Kernels& kernels, const std::vector<double>& terms) {
  double top = -kInfinity;
  for (const double term : terms) top = std::max(top, term);
  if (!std::isfinite(top)) return top;
  std::vector<float> chunk;
  chunk.reserve(kSumChunk);
  double sum = 0;
  for (size_t first = 0; first < terms.size(); first += kSumChunk) {
    const size_t end = std::min(terms.size(), first + kSumChunk);
    chunk.clear();
    for (size_t i = first; i < end; ++i) chunk.push_back(static_cast<float>(terms[i] - top));
    sum += kernels.exp_sum(chunk.data(), chunk.size(), 0);
  }
  return top + std::log(sum);
}

}  // namespace

std::vector<EstimatedCluster> LocateEstimated(HeadIndex index, std::span<const uint32_t> clusters) {
  std::vector<EstimatedCluster> located;
  located.reserve(clusters.size());
  size_t segment_idx = 0;
  uint32_t first = 0;  // Flat index of the segment's first cluster.
  for (const uint32_t cluster : clusters) {
    WAVEKV_CHECK(cluster >= first, "estimated clusters ascend");
    while (segment_idx < index.size() && cluster - first >= index[segment_idx]->cluster_count) {
      first += index[segment_idx++]->cluster_count;
    }
    WAVEKV_CHECK(segment_idx < index.size(), "a flat cluster index below ClusterCount");
    located.push_back({index[segment_idx], cluster - first, cluster});
  }
  return located;
}

void EstimateOutput(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
                    const GroupQuery& query, const ClusterScores& scores,
                    PartialAttention* result) {
  constexpr uint32_t kTileRows = SoftmaxAccumulator::kTileRows;
  SoftmaxAccumulator accumulator(kernels, query.group_size, query.value_dim,
                                 IndexDType(query.payload_dtype));
  std::vector<float> tile_scores(size_t{query.group_size} * kTileRows);
  std::vector<ValueRun> runs;
  for (size_t first = 0; first < clusters.size(); first += kTileRows) {
    const auto tile = clusters.subspan(first, std::min<size_t>(kTileRows, clusters.size() - first));
    runs.clear();
    for (size_t i = 0; i < tile.size(); ++i) {
      const EstimatedCluster& cluster = tile[i];
      const float log_size = LogSize(cluster.segment->sizes[cluster.cluster_idx]);
      for (uint32_t g = 0; g < query.group_size; ++g) {
        tile_scores[size_t{g} * kTileRows + i] =
            scores.logits[size_t{g} * scores.cluster_count + cluster.flat_idx] + log_size;
      }
      const auto* mean = reinterpret_cast<const std::byte*>(
          &cluster.segment->value_means[size_t{cluster.cluster_idx} * query.value_dim]);
      const bool follows = i > 0 && tile[i - 1].segment == cluster.segment &&
                           tile[i - 1].cluster_idx + 1 == cluster.cluster_idx;
      if (follows) {
        ++runs.back().row_count;
      } else {
        runs.push_back({mean, 1});
      }
    }
    accumulator.AddTile(tile_scores.data(), static_cast<uint32_t>(tile.size()), runs);
  }
  accumulator.Finish(result);
}

void BoundEstimate(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
                   std::span<const double> reaches, const ClusterScores& scores,
                   std::vector<float>* lower, std::vector<float>* upper) {
  lower->clear();
  upper->clear();
  std::vector<double> lower_terms(clusters.size()), upper_terms(clusters.size());
  for (uint32_t g = 0; g < scores.group_size; ++g) {
    const float* logits = scores.logits.data() + size_t{g} * scores.cluster_count;
    const SegmentHead* segment = nullptr;
    double slack = 0;
    for (size_t i = 0; i < clusters.size(); ++i) {
      const EstimatedCluster& cluster = clusters[i];
      if (cluster.segment != segment) {
        segment = cluster.segment;
        slack = ScoreSlack(*segment, reaches[g]);
      }
      const uint32_t c = cluster.cluster_idx;
      const LogMassBounds bounds =
          BoundLogMass(logits[cluster.flat_idx], segment->sizes[c], segment->deltas[c],
                       segment->radii[c], reaches[g], slack);
      lower_terms[i] = bounds.lower;
      upper_terms[i] = bounds.upper;
    }
    AppendBounds(kernels, lower_terms, upper_terms, lower, upper);
  }
}

void AppendBounds(const simd::Kernels& kernels, const std::vector<double>& lower_terms,
                  const std::vector<double>& upper_terms, std::vector<float>* lower,
                  std::vector<float>* upper) {
  lower->push_back(RoundDown(LogSumExp(kernels, lower_terms) - kSumSlack));
  upper->push_back(RoundUp(LogSumExp(kernels, upper_terms) + kSumSlack));
}

}  // namespace wavekv
