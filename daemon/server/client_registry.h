// Leases: which clients are attached, by which secret, and until when.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/clock.h"
#include "storage/base/ids.h"
#include "storage/base/mutex.h"

namespace wavekv {

inline constexpr uint64_t kLeaseMsMin = 100;
inline constexpr size_t kClientNameBytesMax = 128;

struct LeaseOptions {
  uint64_t lease_ms = 30'000;       // Granted to a client that asks for none.
  uint64_t lease_ms_max = 600'000;  // The longest that is granted.
  uint32_t clients_max = 1024;      // Per tenant.
};

class ClientRegistry;

// A call of a client that is running. While it lives the lease does not end; when it goes, the
// lease begins anew. The registry must outlive it.
class ClientHold {
 public:
  ClientHold() = default;
  ~ClientHold() { Release(); }
  ClientHold(ClientHold&& other) noexcept;
  ClientHold& operator=(ClientHold&& other) noexcept;
  ClientHold(const ClientHold&) = delete;
  ClientHold& operator=(const ClientHold&) = delete;

  ClientId client() const { return client_; }
  void Release();

 private:
  friend class ClientRegistry;
  ClientHold(ClientRegistry* registry, ClientId client) : registry_(registry), client_(client) {}

  ClientRegistry* registry_ = nullptr;
  ClientId client_;
};

// Thread-safe; no call blocks.
class ClientRegistry {
 public:
  struct Lease {
    ClientId client;
    std::string secret;  // 16 bytes.
    uint64_t lease_ms = 0;
  };

  // `clock` must outlive the registry.
  ClientRegistry(const LeaseOptions& options, const Clock* clock);

  // InvalidArgument: the name is too long. ResourceExhausted: the tenant has clients_max clients.
  absl::StatusOr<Lease> Attach(const TenantId& tenant, std::string_view name, uint64_t lease_ms);

  // Begins a call. Unauthenticated: no client of `tenant` has this secret, or its lease is over.
  absl::StatusOr<ClientHold> Authenticate(const TenantId& tenant, std::string_view secret);
  // Begins the next piece of work of a call that was authenticated before.
  absl::StatusOr<ClientHold> Resume(ClientId client);

  // From now on the secret is unknown. The client is among the ended ones once no call of it runs.
  void Detach(ClientId client);

  // Removes and returns the clients whose lease is over and who have no call running. What they
  // own is to be released now.
  std::vector<ClientId> TakeEnded();

  // The lease of an attached client, 0 for others.
  uint64_t LeaseMs(ClientId client) const;
  // Empty for a client that is gone.
  std::string NameOf(ClientId client) const;
  // Of every tenant that has any.
  std::map<TenantId, uint32_t> CountByTenant() const;
  uint32_t Count() const;

 private:
  friend class ClientHold;

  struct Client {
    TenantId tenant;
    std::string name;
    std::string secret;
    uint64_t lease_ms = 0;
    int64_t ends_ms = 0;
    uint32_t hold_count = 0;
    bool detached = false;
  };

  void ReleaseHold(ClientId client);
  bool IsOver(const Client& client) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const LeaseOptions options_;
  const Clock* const clock_;
  mutable Mutex mutex_;
  uint64_t last_id_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<ClientId, Client> clients_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, ClientId> by_secret_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<TenantId, uint32_t> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv
