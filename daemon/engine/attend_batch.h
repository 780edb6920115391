// The story of Attend: validate, append, snapshot, attend over the zones, merge, admit.
#pragma once

#include <span>
#include <vector>

#include "daemon/engine/layer_step.h"
#include "daemon/engine/sequence_registry.h"
#include "daemon/engine/types.h"
#include "index/backend/stager.h"
#include "storage/base/thread_pool.h"

namespace wavekv {

// What steps need of the engine; outlives them.
struct StepResources {
  ComputeBackend* backend = nullptr;
  Stager* stager = nullptr;  // May be null.
  ThreadPool* pool = nullptr;
  const SequenceRegistry* registry = nullptr;
};

// Runs the steps, each on its own: one that fails touches no other. KV heads of all steps are
// spread over the pool; steps that name a (sequence, layer) again run after the earlier ones.
// `sink` may be null.
std::vector<AttendOutcome> RunAttendBatch(const StepResources& resources, const TenantId& tenant,
                                          std::span<const AttendStep> steps, AnswerSink* sink);

// The call's budget, validated, where it has one; else the layer's.
absl::StatusOr<ZoneBudget> BudgetOf(const Sequence& sequence, uint32_t layer,
                                    const std::optional<ZoneBudget>& budget);

}  // namespace wavekv
