// The manager's side of one resident region: publishes versions of the index, keeps the books of
// the block cache, copies appended rows out (docs/decisions/015-resident-region.md).
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "gpu/resident/resident_plan.h"
#include "gpu/tenant_buffer.h"
#include "index/backend/resident.h"
#include "storage/base/ids.h"
#include "storage/base/model_shape.h"
#include "storage/base/thread_pool.h"

namespace wavekv::resident {

// Carves a region of `buffer` and writes its header. It is not in the buffer's directory: who
// attaches is told where it lies, and a reader of staged steps must not take it for its own. A
// closed one is wiped and given back as its engine allows (TenantBuffer::Sweep tries again).
// `helpers`, which many regions may share, take part in a round's books, a unit each; null: the
// caller alone. InvalidArgument: PlanResident's. ResourceExhausted: no room in the buffer. Else the
// memory's failure.
absl::StatusOr<std::unique_ptr<ResidentSequence>> CreateResidentRegion(
    std::shared_ptr<TenantBuffer> buffer, SequenceId sequence, const ModelShape& shape,
    uint64_t max_tokens, const ResidentOptions& options,
    std::shared_ptr<ThreadPool> helpers = nullptr);

}  // namespace wavekv::resident
