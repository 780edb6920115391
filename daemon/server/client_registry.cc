#include "daemon/server/client_registry.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/random.h"

namespace wavekv {

ClientHold::ClientHold(ClientHold&& other) noexcept
    : registry_(std::exchange(other.registry_, nullptr)), client_(other.client_) {}

ClientHold& ClientHold::operator=(ClientHold&& other) noexcept {
  if (this != &other) {
    Release();
    registry_ = std::exchange(other.registry_, nullptr);
    client_ = other.client_;
  }
  return *this;
}

void ClientHold::Release() {
  if (registry_ != nullptr) std::exchange(registry_, nullptr)->ReleaseHold(client_);
}

ClientRegistry::ClientRegistry(const LeaseOptions& options, const Clock* clock)
    : options_(options), clock_(clock) {}

absl::StatusOr<ClientRegistry::Lease> ClientRegistry::Attach(const TenantId& tenant,
                                                             std::string_view name,
                                                             uint64_t lease_ms) {
  if (name.size() > kClientNameBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(
        "client_name has ", name.size(), " bytes, expected at most ", kClientNameBytesMax));
  }
  Lease lease;
  lease.secret = RandomSecret();
  lease.lease_ms =
      std::clamp(lease_ms == 0 ? options_.lease_ms : lease_ms, kLeaseMsMin, options_.lease_ms_max);
  MutexLock lock(&mutex_);
  uint32_t& count = counts_[tenant];
  if (count >= options_.clients_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tenant ", tenant, " has ", count,
                     " clients attached, the most that --clients_max of wavekvd allows; detach "
                     "some or wait until their leases end"));
  }
  ++count;
  lease.client = ClientId(++last_id_);
  clients_[lease.client] = {.tenant = tenant,
                            .name = std::string(name),
                            .secret = lease.secret,
                            .lease_ms = lease.lease_ms,
                            .ends_ms = clock_->NowMs() + static_cast<int64_t>(lease.lease_ms)};
  by_secret_[lease.secret] = lease.client;
  return lease;
}

absl::StatusOr<ClientHold> ClientRegistry::Authenticate(const TenantId& tenant,
                                                        std::string_view secret) {
  MutexLock lock(&mutex_);
  const auto found = by_secret_.find(absl::string_view(secret.data(), secret.size()));
  if (found != by_secret_.end()) {
    Client& client = clients_[found->second];
    if (client.tenant == tenant && !IsOver(client)) {
      ++client.hold_count;
      return ClientHold(this, found->second);
    }
  }
  return absl::UnauthenticatedError(
      "unknown client secret: attach first; a lease that is not renewed by a heartbeat or another "
      "call ends, and its secret with it");
}

absl::StatusOr<ClientHold> ClientRegistry::Resume(ClientId id) {
  MutexLock lock(&mutex_);
  const auto found = clients_.find(id);
  if (found == clients_.end() || found->second.detached || IsOver(found->second)) {
    return absl::UnauthenticatedError(
        "the client's lease has ended while its stream or channel was open");
  }
  ++found->second.hold_count;
  return ClientHold(this, id);
}

void ClientRegistry::Detach(ClientId id) {
  MutexLock lock(&mutex_);
  const auto found = clients_.find(id);
  if (found == clients_.end() || found->second.detached) return;
  found->second.detached = true;
  by_secret_.erase(found->second.secret);
}

std::vector<ClientId> ClientRegistry::TakeEnded() {
  MutexLock lock(&mutex_);
  std::vector<ClientId> ended;
  for (const auto& [id, client] : clients_) {
    if (client.hold_count == 0 && (client.detached || IsOver(client))) ended.push_back(id);
  }
  for (const ClientId id : ended) {
    const auto found = clients_.find(id);
    by_secret_.erase(found->second.secret);
    const auto count = counts_.find(found->second.tenant);
    if (--count->second == 0) counts_.erase(count);
    clients_.erase(found);
  }
  std::sort(ended.begin(), ended.end());
  return ended;
}

uint64_t ClientRegistry::LeaseMs(ClientId id) const {
  MutexLock lock(&mutex_);
  const auto found = clients_.find(id);
  return found == clients_.end() ? 0 : found->second.lease_ms;
}

std::string ClientRegistry::NameOf(ClientId id) const {
  MutexLock lock(&mutex_);
  const auto found = clients_.find(id);
  return found == clients_.end() ? "" : found->second.name;
}

std::map<TenantId, uint32_t> ClientRegistry::CountByTenant() const {
  MutexLock lock(&mutex_);
  return {counts_.begin(), counts_.end()};
}

uint32_t ClientRegistry::Count() const {
  MutexLock lock(&mutex_);
  return static_cast<uint32_t>(clients_.size());
}

void ClientRegistry::ReleaseHold(ClientId id) {
  MutexLock lock(&mutex_);
  const auto found = clients_.find(id);
  WAVEKV_CHECK(found != clients_.end() && found->second.hold_count > 0,
               "a client with a call running was removed");
  --found->second.hold_count;
  found->second.ends_ms = clock_->NowMs() + static_cast<int64_t>(found->second.lease_ms);
}

bool ClientRegistry::IsOver(const Client& client) const {
  return client.hold_count == 0 && clock_->NowMs() >= client.ends_ms;
}

}  // namespace wavekv
