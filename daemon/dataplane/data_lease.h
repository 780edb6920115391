// What this room must know of clients, and daemon/server does.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/shm/requests.h"
#include "storage/base/fd_socket.h"
#include "storage/base/ids.h"

namespace wavekv {

// An attached client's leave to call. Used by one thread.
class DataLease {
 public:
  virtual ~DataLease() = default;
  virtual ClientId client() const = 0;
  virtual const TenantId& tenant() const = 0;
  // Renews the lease, which does not end before EndCall. Unauthenticated: it is over; Unavailable:
  // the daemon is shutting down.
  virtual absl::Status BeginCall() = 0;
  // Of a call that BeginCall let begin: how it ended, and how long its answer took. Nullopt: it has
  // not happened, and the client asks again with more room.
  virtual void EndCall(shm::Verb verb, std::optional<absl::StatusCode> code, double latency_us) = 0;
};

// Thread-safe.
class DataClients {
 public:
  virtual ~DataClients() = default;
  // Unauthenticated: no client of the peer's uid has the secret. FailedPrecondition: of an earlier
  // life of the daemon.
  virtual absl::StatusOr<std::unique_ptr<DataLease>> Admit(const PeerCredentials& peer,
                                                           absl::string_view secret,
                                                           uint64_t epoch) = 0;
};

}  // namespace wavekv
