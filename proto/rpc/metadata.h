// Metadata keys of wavekv.v1.
#pragma once

namespace wavekv {

// The client's secret of Attach: 16 bytes. Every call but Attach carries it.
inline constexpr char kSecretKey[] = "wavekv-secret-bin";
// The epoch of Attach, decimal. Every call but Attach carries it.
inline constexpr char kEpochKey[] = "wavekv-epoch";
// Trailing metadata of a FAILED_PRECONDITION that means "you attached to an earlier life of this
// daemon: attach again". Its value is the daemon's epoch, decimal.
inline constexpr char kStaleEpochKey[] = "wavekv-stale-epoch";
// Over TCP: kBearerPrefix and the token.
inline constexpr char kAuthorizationKey[] = "authorization";
inline constexpr char kBearerPrefix[] = "Bearer ";

}  // namespace wavekv
