// The manager's side of one resident region: publishes versions of the index, keeps the books of
// the block cache, copies appended rows out (docs/decisions/015-resident-region.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/resident/resident_layout.h"
#include "gpu/tenant_buffer.h"
#include "index/backend/resident.h"
#include "storage/base/ids.h"
#include "storage/base/model_shape.h"

namespace wavekv::resident {

// `shape` has one head dim for keys and values, 64, 128 or 256, and a 16-bit dtype.
// InvalidArgument names what does not fit a GPU's step.
absl::StatusOr<ResidentHeader> PlanResident(const ModelShape& shape, uint64_t max_tokens,
                                            const ResidentOptions& options);

// Carves a region of `buffer` and writes its header; closed ones are wiped and given back as their
// engine allows. ResourceExhausted: no room in the buffer. Else the memory's failure.
absl::StatusOr<std::unique_ptr<ResidentSequence>> CreateResidentRegion(
    std::shared_ptr<TenantBuffer> buffer, SequenceId sequence, const ModelShape& shape,
    uint64_t max_tokens, const ResidentOptions& options);

}  // namespace wavekv::resident
