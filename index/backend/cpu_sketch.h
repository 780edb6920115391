// The finer part of the estimation zone on the CPU: every token by the score of its sketched key.
#pragma once

#include <span>

#include "index/backend/cpu_estimate.h"

namespace wavekv {

// `clusters` in segments that have a sketch; reaches [group_size] from QueryReach.
void SketchOutput(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
                  const GroupQuery& query, std::span<const double> reaches,
                  const ClusterScores& scores, bool bounds, EstimatedAttention* result);

}  // namespace wavekv
