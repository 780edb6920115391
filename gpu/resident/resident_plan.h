// How a resident region is divided: a pure function of shape, length and options.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "gpu/resident/resident_layout.h"
#include "index/backend/resident.h"
#include "storage/base/model_shape.h"

namespace wavekv::resident {

// The header of a region, complete but for sequence_id and state. Numbers of clusters, blocks and
// segment entries suffice for an index of 16 tokens a cluster, outliers included, while the
// segments of two more stretches of 8,192 tokens are replaced.
// InvalidArgument names what a step on a GPU cannot do, found and allowed: a dtype of 32 bits, dims
// other than 64, 128 or 256, or of keys and values that differ, more than 16 query heads of a KV
// head, too many tokens; and options out of range.
absl::StatusOr<ResidentHeader> PlanResident(const ModelShape& shape, uint64_t max_tokens,
                                            const ResidentOptions& options);

}  // namespace wavekv::resident
