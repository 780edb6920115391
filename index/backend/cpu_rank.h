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

// For query head `g`, log_masses [clusters] from logits [clusters]: the expected log mass of each
// cluster. Returns the largest.
float EstimateLogMasses(const simd::Kernels& kernels, HeadIndex index, const GroupQuery& query,
                        uint32_t g, std::span<const float> logits, float* log_masses);

}  // namespace wavekv
