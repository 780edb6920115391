#include "proto/rpc/protocol_version.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace wavekv {

absl::StatusOr<uint32_t> NegotiateProtocolVersion(uint32_t peer_min, uint32_t peer_max) {
  if (peer_min == 0 || peer_min > peer_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("protocol versions ", peer_min, " to ", peer_max,
                     " are no range: expected 1 <= protocol_version_min <= protocol_version_max"));
  }
  const uint32_t version = std::min(peer_max, kProtocolVersionMax);
  if (version < std::max(peer_min, kProtocolVersionMin)) {
    return absl::FailedPreconditionError(
        absl::StrCat("no common protocol version: the client speaks ", peer_min, " to ", peer_max,
                     ", the daemon (", WAVEKV_VERSION, ") speaks ", kProtocolVersionMin, " to ",
                     kProtocolVersionMax, "; use a client and a daemon of the same release"));
  }
  return version;
}

}  // namespace wavekv
