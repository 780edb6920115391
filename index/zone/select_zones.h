// Chooses the zones of one KV head for a step: a pure function of the index's summary, the scores
// and the budget.
#pragma once

#include <span>

#include "index/segment.h"
#include "index/zone/zone_plan.h"

namespace wavekv {

// `reaches` [group_size] from QueryReach and `steady_lse` [group_size] matter to an error budget
// alone. Clusters of equal rank go in order of their flat index. Fewer clusters than the budget
// asks for are all retrieved. `budget` is valid.
ZonePlan SelectZones(HeadIndex index, const ClusterScores& scores, std::span<const double> reaches,
                     std::span<const float> steady_lse, const ZoneBudget& budget);

// How many of `clusters` a budget of kRatio or kClusters, the kinds that look at no query,
// retrieves.
uint32_t FixedRetrievalCount(const ZoneBudget& budget, uint32_t clusters);

// Likewise, for a step that has no sketch: where the budget sketches some, at least a seventh more
// than these, and 1.4 % (docs/decisions/010-gpu-step.md).
uint32_t UnsketchedRetrievalCount(const ZoneBudget& budget, bool sketch, uint32_t clusters);

}  // namespace wavekv
