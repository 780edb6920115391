// The stories of Query and Estimate: rank, plan, stage, estimate.
#pragma once

#include "absl/status/statusor.h"
#include "daemon/engine/attend_batch.h"

namespace wavekv {

// See Engine::Query.
absl::StatusOr<QueryOutcome> RunQuery(const StepResources& resources, const TenantId& tenant,
                                      const LayerQuery& query, const QueryOptions& options);

// See Engine::Estimate.
absl::StatusOr<EstimateOutcome> RunEstimate(const StepResources& resources, const TenantId& tenant,
                                            const LayerQuery& query);

}  // namespace wavekv
