// Who may use the data plane: the same identities, leases and counters as over gRPC.
#pragma once

#include <memory>

#include "daemon/dataplane/data_lease.h"
#include "daemon/server/identity.h"
#include "daemon/server/service_core.h"

namespace wavekv {

// Thread-safe.
class DataLeases final : public DataClients {
 public:
  // Both must outlive the object and the leases it gives.
  DataLeases(ServiceCore* core, const UidIdentities* identities)
      : core_(core), identities_(identities) {}

  absl::StatusOr<std::unique_ptr<DataLease>> Admit(const PeerCredentials& peer,
                                                   absl::string_view secret,
                                                   uint64_t epoch) override;

 private:
  ServiceCore* const core_;
  const UidIdentities* const identities_;
};

}  // namespace wavekv
