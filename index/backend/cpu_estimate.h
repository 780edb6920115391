// The estimation zone on the CPU: a cluster is one pseudo-token with its estimated mass and the
// stored value mean.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/backend/compute_backend.h"
#include "index/simd/kernels.h"

namespace wavekv {

// A cluster of the estimation zone.
struct EstimatedCluster {
  const SegmentHead* segment = nullptr;
  uint32_t cluster_idx = 0;  // In the segment.
  uint32_t flat_idx = 0;     // In the scores.

  size_t first_row() const { return segment->first_row[cluster_idx]; }
  size_t row_count() const { return segment->first_row[cluster_idx + 1] - first_row(); }
};

// `clusters` are flat indices, ascending.
std::vector<EstimatedCluster> LocateEstimated(HeadIndex index, std::span<const uint32_t> clusters);

// Fills `attention` and `bytes_read` of the result. `clusters` are flat indices, ascending.
void EstimateOnCpu(const simd::Kernels& kernels, HeadIndex index,
                   std::span<const uint32_t> clusters, const GroupQuery& query,
                   const ClusterScores& scores, EstimatedAttention* result);

// Bounds of the true log mass of all clusters together, slack for every rounding included.
// lower, upper [group_size]; reaches [group_size] from QueryReach.
void BoundEstimate(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
                   std::span<const double> reaches, const ClusterScores& scores,
                   std::vector<float>* lower, std::vector<float>* upper);

// Covers a vector exponential's few units in the last place, its float argument (below 104 in
// magnitude where it matters) and the sum of a chunk.
inline constexpr double kSumSlack = 1e-4;

// Appends log(sum of exp(terms)) of both, rounded outwards with its own slack.
void AppendBounds(const simd::Kernels& kernels, const std::vector<double>& lower_terms,
                  const std::vector<double>& upper_terms, std::vector<float>* lower,
                  std::vector<float>* upper);

}  // namespace wavekv
