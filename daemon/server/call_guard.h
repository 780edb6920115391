// From a call's connection and metadata to its caller and lease.
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "daemon/server/service_core.h"
#include "grpcpp/server_context.h"

namespace wavekv {

// Thread-safe.
class CallGuard {
 public:
  // Says who speaks on a call: the peer of a UNIX connection, or the holder of a token.
  using Identify = std::function<absl::StatusOr<Caller>(const grpc::CallbackServerContext&)>;

  // `core` must outlive the guard.
  CallGuard(ServiceCore* core, Identify identify);

  // For Attach: the caller, without a lease.
  absl::StatusOr<CallScope> Admit(grpc::CallbackServerContext* context) const;
  // For every other call: renews the lease. Unauthenticated: no or an unknown secret.
  // FailedPrecondition, with the trailing metadata kStaleEpochKey: of an earlier daemon.
  absl::StatusOr<CallScope> Authenticate(grpc::CallbackServerContext* context) const;

 private:
  ServiceCore* const core_;
  const Identify identify_;
};

// FailedPrecondition: the call is of the daemon's life `epoch`, and this is another.
absl::Status StaleEpochError(uint64_t epoch, uint64_t daemon_epoch);

// An Identify for TCP. `tokens` must outlive it.
CallGuard::Identify IdentifyByToken(const TokenTable* tokens);

}  // namespace wavekv
