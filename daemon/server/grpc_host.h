// The gRPC servers: one for each uid that connects over the UNIX socket, one for TCP.
//
// A server of its own for each uid binds the identity to the connection: its service was made for
// that uid, and no call can reach another's (docs/decisions/001-identity-and-sockets.md).
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/server/service_core.h"
#include "storage/base/mutex.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

// Thread-safe.
class GrpcHost {
 public:
  // `core` and `identities` must outlive the host.
  GrpcHost(ServiceCore* core, const UidIdentities* identities);
  ~GrpcHost();

  // Serves an accepted connection of `uid`. ResourceExhausted: --uids_max different uids have
  // connected already. Closes the connection on failure.
  absl::Status ServeConnection(UniqueFd connection, uid_t uid);
  // Serves TCP at `address` and returns the address with the real port. `tokens` must outlive the
  // host. Unavailable, naming the address: it cannot be bound.
  absl::StatusOr<std::string> ServeTcp(const std::string& address, const TokenTable* tokens);

  // Health answers NOT_SERVING from now on.
  void SetNotServing();
  // Cancels what still runs, closes every connection, and returns when no call runs any more. To be
  // gentle, wait for the calls first: gRPC's own grace would wait for idle connections, too.
  void Shutdown();

 private:
  struct Hosted;

  ServiceCore* const core_;
  const UidIdentities* const identities_;
  Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<uid_t, std::unique_ptr<Hosted>> by_uid_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Hosted> tcp_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv
