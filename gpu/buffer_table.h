// What wavebufferd knows: managers with their leases, allocations, tickets, and the memory limit.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "gpu/device_memory.h"
#include "storage/base/clock.h"
#include "storage/base/descriptor_server.h"
#include "storage/base/fd_socket.h"
#include "storage/base/mutex.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

struct BufferTableOptions {
  uint64_t bytes_max = 0;
  int64_t lease_ms = 10'000;
  uint32_t managers_max = 16;
  uint32_t allocations_max = 4096;            // Of all managers.
  uint32_t tickets_per_allocation_max = 256;  // Client uids of one tenant.
};

struct AllocationGrant {
  uint64_t id = 0;
  std::string manager_ticket;
  uint64_t bytes = 0;
};

struct BufferUsage {
  uint64_t bytes_max = 0;
  uint64_t bytes_used = 0;       // Held by allocations, by readers of released ones, overhead.
  uint64_t lingering_bytes = 0;  // Of bytes_used: released, but a reader still maps them.
  uint64_t overhead_bytes = 0;   // Of bytes_used: DeviceMemory::overhead_bytes().
  uint64_t wiped_bytes = 0;      // Given back since start.
  uint32_t allocations = 0;
  uint32_t managers = 0;
};

// Thread-safe. Secrets and tickets are 16 bytes from the kernel's generator; an unknown one and
// one that belongs to somebody else are both NotFound.
//
// A manager is gone when its process is (seen through a pidfd, taken when the manager fetches a
// writable descriptor), or when its lease ends and no such process is known. A stopped process
// whose lease ended keeps its memory: it maps it, so that counting it as free would be a lie.
class BufferTable {
 public:
  // `memory` and `clock` outlive the table. `bytes_max` is no less than the memory's overhead.
  BufferTable(const BufferTableOptions& options, DeviceMemory* memory, Clock* clock);
  ~BufferTable();

  // The new manager's secret. ResourceExhausted: too many managers.
  absl::StatusOr<std::string> AttachManager(absl::string_view name, int64_t claimed_pid);
  absl::Status Heartbeat(absl::string_view secret);
  // ResourceExhausted: over the limit; says what was asked, what is free, who holds it and names
  // the flag.
  absl::StatusOr<AllocationGrant> Allocate(absl::string_view secret, absl::string_view tenant,
                                           uint64_t bytes);
  // A client ticket, the same for the same uid. `client_uid` -1: any peer.
  absl::StatusOr<std::string> IssueTicket(absl::string_view secret, uint64_t allocation_id,
                                          int64_t client_uid);
  // FailedPrecondition: the manager has not fetched its descriptor yet.
  absl::Status Seal(absl::string_view secret, uint64_t allocation_id);
  absl::Status Release(absl::string_view secret, uint64_t allocation_id);

  // The descriptor a ticket stands for, for the peer with these credentials; `peer_process` is
  // that peer's pidfd, when one could be had. A manager's ticket is good once and for our own uid
  // or root; a client's for its uid, as often as it likes, once the allocation is sealed.
  absl::StatusOr<Redeemed> Redeem(absl::string_view ticket, const PeerCredentials& peer,
                                  UniqueFd peer_process);

  // Takes back what dead managers held and what readers let go. Called several times a second.
  void Reap();

  BufferUsage Usage() const;
  const BufferTableOptions& options() const { return options_; }

 private:
  struct Manager;
  struct Allocation;
  struct Ticket {
    uint64_t allocation_id = 0;
    bool manager = false;
    int64_t client_uid = -1;
  };
  struct ReapedManager {
    std::string name;
    bool gone = false;  // Or else only stalled.
    uint64_t released_bytes = 0;
  };
  using ManagerMap = absl::flat_hash_map<std::string, std::unique_ptr<Manager>>;

  absl::StatusOr<Manager*> FindManager(absl::string_view secret)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Allocation*> FindAllocation(absl::string_view secret, uint64_t allocation_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ReserveBytes(absl::string_view tenant, uint64_t bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropAllocation(uint64_t allocation_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<ReapedManager> ReapManagers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReapReaders() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string Holders() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const BufferTableOptions options_;
  DeviceMemory* const memory_;
  Clock* const clock_;

  mutable Mutex mutex_;
  ManagerMap managers_ ABSL_GUARDED_BY(mutex_);  // By secret.
  absl::flat_hash_map<uint64_t, std::unique_ptr<Allocation>> allocations_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, Ticket> tickets_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<DeviceAllocation>> lingering_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_allocation_id_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t bytes_used_ ABSL_GUARDED_BY(mutex_);
  uint64_t lingering_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t wiped_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace wavekv
