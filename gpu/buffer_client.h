// The control plane of wavebufferd, as wavekvd calls it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace wavekv {

// What AttachManager granted.
struct BufferLease {
  std::string secret;
  int64_t lease_ms = 0;
  std::string device_uuid;
  std::string backend;
  uint64_t bytes_max = 0;
  std::string descriptor_socket;
};

struct BufferGrant {
  uint64_t allocation_id = 0;
  std::string manager_ticket;
  uint64_t bytes = 0;
};

struct BufferStats {
  uint64_t bytes_max = 0;
  uint64_t bytes_used = 0;
  bool pinned = false;
};

// Thread-safe. Every call has a time limit of a few seconds. Unavailable (naming the address):
// wavebufferd is away. NotFound: it does not know this manager or allocation.
class BufferClient {
 public:
  virtual ~BufferClient() = default;

  // Of wavebufferd, as it was given.
  virtual const std::string& address() const = 0;
  // Begins a lease as the manager of that name; its secret goes with every later call.
  virtual absl::StatusOr<BufferLease> Attach(const std::string& manager_name) = 0;
  // Keeps the lease for another lease_ms.
  virtual absl::Status Heartbeat(const std::string& secret) = 0;
  // Lends `bytes` of zeroed memory for a tenant; the grant's ticket buys a writable descriptor,
  // once. ResourceExhausted: --bytes_max is reached, the text says who holds what.
  virtual absl::StatusOr<BufferGrant> Allocate(const std::string& secret, const std::string& tenant,
                                               uint64_t bytes) = 0;
  // A ticket with which a process of `client_uid` gets a read-only descriptor of the allocation.
  virtual absl::StatusOr<std::string> IssueTicket(const std::string& secret, uint64_t allocation_id,
                                                  int64_t client_uid) = 0;
  // Seals the allocation, which its manager has mapped, against every further writer; clients'
  // tickets are good from then on.
  virtual absl::Status Seal(const std::string& secret, uint64_t allocation_id) = 0;
  // Gives the allocation back; its tickets are unknown from now on.
  virtual absl::Status Release(const std::string& secret, uint64_t allocation_id) = 0;
  // Of the whole wavebufferd.
  virtual absl::StatusOr<BufferStats> Stats() = 0;
};

// A client of the wavebufferd at `address` ("unix:/path"); connects when first called.
// InvalidArgument: `address` is no such address.
absl::StatusOr<std::unique_ptr<BufferClient>> CreateBufferClient(const std::string& address);

}  // namespace wavekv
