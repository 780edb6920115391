// Versions of the protocol that this build speaks, and how two ranges meet.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace wavekv {

inline constexpr uint32_t kProtocolVersionMin = 1;
inline constexpr uint32_t kProtocolVersionMax = 1;

// The highest version in both the peer's range and ours.
// InvalidArgument: the peer's range is empty. FailedPrecondition: nothing in common; names both
// ranges.
absl::StatusOr<uint32_t> NegotiateProtocolVersion(uint32_t peer_min, uint32_t peer_max);

}  // namespace wavekv
