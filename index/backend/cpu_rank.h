// Ranking on the CPU: scores of every centroid, estimated masses, ranks.
#pragma once

#include <span>
#include <vector>

#include "index/backend/compute_backend.h"
#include "index/simd/kernels.h"

namespace wavekv {

// ComputeBackend::RankClusters of a checked query.
void RankOnCpu(const simd::Kernels& kernels, HeadIndex index, const GroupQuery& query,
               std::span<const float> steady_lse, ClusterScores* scores);

// [segments, group_size]: for each unit of key spread the variance of the logits, which is scale^2
// times the sum of q_j^2 * spread_shares_j.
std::vector<float> ReachSquares(const simd::Kernels& kernels, HeadIndex index,
                                const GroupQuery& query);

// The expected log mass of each cluster for each head of a group, and the largest of each head.
// reach_squares [segments, tops.size()] from ReachSquares; logits and log_masses [tops.size(),
// cluster_count].
void EstimateLogMasses(const simd::Kernels& kernels, HeadIndex index, uint32_t cluster_count,
                       std::span<const float> reach_squares, const float* logits, float* log_masses,
                       std::span<float> tops);

}  // namespace wavekv
