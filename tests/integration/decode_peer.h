// What decode_peer and whoever starts it agree on: decode_peer ADDRESS SEED.
//
// It is an engine in a process of its own. It fills a sequence with random tokens, attaches it and
// decodes the others over its resident region, by the kernels where WAVEKV_TEST_GPU=1, otherwise by
// the reference step; it holds every answer against exact attention. It says how far it is, one
// line each: kConnected, kBuilt, kAttached, then TokenLine of every token.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace wavekv::integration {

inline constexpr uint64_t kPeerFirstToken = 700;  // Decoded first; those before are prefilled.
inline constexpr uint64_t kPeerTokens = 1300;
inline constexpr uint64_t kPeerTokensMax = 4096;  // That its sequence is made for.

inline constexpr char kConnected[] = "connected\n";
inline constexpr char kBuilt[] = "built\n";
inline constexpr char kAttached[] = "attached\n";
inline std::string TokenLine(uint64_t position) { return absl::StrCat("token ", position, "\n"); }

// How it ends.
enum PeerExit : int {
  kPeerDecoded = 0,  // All tokens, and the daemon has stored what was appended.
  kPeerFailed = 1,
  kPeerWrong = 3,  // An answer was not that of exact attention.
  kPeerAway = 4,   // A daemon went away, or the attachment ended: it says so and stops.
};

}  // namespace wavekv::integration
