// A resident region that notices when the buffer it lies in is lost.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "index/backend/resident.h"

namespace wavekv {

// `region` as it is, with `buffer` kept as long; but before each round, and before a write or a
// publication, `check_buffer` is asked, and what it refuses is not done. Memory on a GPU outlives
// whoever lent it, so that the region's own transfers would go on.
std::unique_ptr<ResidentSequence> HoldResident(std::unique_ptr<ResidentSequence> region,
                                               std::shared_ptr<const void> buffer,
                                               std::function<absl::Status()> check_buffer);

}  // namespace wavekv
