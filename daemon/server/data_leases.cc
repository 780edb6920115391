#include "daemon/server/data_leases.h"

#include <optional>
#include <string_view>
#include <utility>

#include "daemon/server/call_guard.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

Rpc RpcOf(shm::Verb verb) {
  switch (verb) {
    case shm::kInsert:
      return Rpc::kInsert;
    case shm::kQuery:
      return Rpc::kQuery;
    case shm::kEstimate:
      return Rpc::kEstimate;
    case shm::kAttend:
      return Rpc::kAttend;
  }
  return Rpc::kAttend;
}

class Lease final : public DataLease {
 public:
  Lease(ServiceCore* core, TenantId tenant, ClientId client)
      : core_(core), tenant_(std::move(tenant)), client_(client) {}

  ClientId client() const override { return client_; }
  const TenantId& tenant() const override { return tenant_; }

  absl::Status BeginCall() override {
    if (core_->stopping.load()) return absl::UnavailableError("the daemon is shutting down");
    WAVEKV_ASSIGN_OR_RETURN(hold_, core_->registry.Resume(client_));
    token_.emplace(&core_->calls);
    return absl::OkStatus();
  }

  void EndCall(shm::Verb verb, std::optional<absl::StatusCode> code, double latency_us) override {
    if (code.has_value()) {
      core_->stats.CountCall(RpcOf(verb), *code);
      core_->stats.RecordLatency(RpcOf(verb), latency_us);
    }
    hold_.Release();
    token_.reset();
  }

 private:
  ServiceCore* const core_;
  const TenantId tenant_;
  const ClientId client_;
  ClientHold hold_;
  std::optional<CallTracker::Token> token_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DataLease>> DataLeases::Admit(const PeerCredentials& peer,
                                                             absl::string_view secret,
                                                             uint64_t epoch) {
  if (core_->stopping.load()) return absl::UnavailableError("the daemon is shutting down");
  if (epoch != core_->options.epoch) return StaleEpochError(epoch, core_->options.epoch);
  const Caller caller = identities_->CallerOf(peer.uid);
  WAVEKV_ASSIGN_OR_RETURN(
      const ClientHold hold,
      core_->registry.Authenticate(caller.tenant, std::string_view(secret.data(), secret.size())));
  return std::make_unique<Lease>(core_, caller.tenant, hold.client());
}

}  // namespace wavekv
