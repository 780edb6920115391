// A layer of a sequence as its resident region shows it.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/layer_snapshot.h"
#include "daemon/engine/types.h"
#include "index/backend/resident.h"
#include "storage/block_pool.h"

namespace wavekv {

// The arenas that segments lie in, in the order in which a client knows them.
using ResidentWindows = std::vector<std::shared_ptr<const Arena>>;

// `own` first, then what else the segments of these layers lie in: a fork's, in its ancestors'.
ResidentWindows FindWindows(const BlockPool& pool, std::shared_ptr<const Arena> own,
                            std::span<const LayerSnapshot> layers);

// FailedPrecondition: a segment lies in none of the windows. A sequence near its max_tokens may
// get memory beside its arena, which a client learns of by attaching again.
absl::StatusOr<ResidentLayer> ShowLayer(const LayerSnapshot& snapshot,
                                        const ResidentWindows& windows, const ZoneBudget& budget,
                                        bool sketch);

// FailedPrecondition naming what the sequence has that a step on the device does not: a budget
// that depends on the query, a layer that stays dense.
absl::Status CheckStepsOnDevice(const SequenceSpec& spec);

}  // namespace wavekv
