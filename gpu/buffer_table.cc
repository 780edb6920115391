#include "gpu/buffer_table.h"

#include <poll.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "storage/base/check.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/log.h"
#include "storage/base/random.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr size_t kNameBytesMax = 128;
constexpr size_t kHoldersNamedMax = 8;

static_assert(kTicketBytes == kSecretBytes);

// A pidfd is readable once its process is dead.
bool IsDead(const UniqueFd& process) {
  pollfd entry{process.get(), POLLIN, 0};
  return process.valid() && ::poll(&entry, 1, 0) == 1;
}

absl::Status CheckName(absl::string_view what, absl::string_view name) {
  if (!name.empty() && name.size() <= kNameBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " has ", name.size(), " bytes, expected 1 to ", kNameBytesMax));
}

}  // namespace

struct BufferTable::Manager {
  std::string secret;
  std::string name;
  int64_t lease_ends_ms = 0;
  bool stalled = false;  // The lease ended, the process lives.
  UniqueFd process;
};

struct BufferTable::Allocation {
  uint64_t id = 0;
  std::string manager_secret;
  std::string tenant;
  std::shared_ptr<DeviceAllocation> memory;
  bool fetched = false;
  bool sealed = false;
  std::string manager_ticket;                                // Empty once used.
  absl::flat_hash_map<int64_t, std::string> client_tickets;  // By uid.
};

BufferTable::BufferTable(const BufferTableOptions& options, DeviceMemory* memory, Clock* clock)
    : options_(options), memory_(memory), clock_(clock), bytes_used_(memory->overhead_bytes()) {
  WAVEKV_CHECK(bytes_used_ <= options.bytes_max, "the limit leaves room for the overhead");
}

BufferTable::~BufferTable() = default;

absl::StatusOr<BufferTable::Manager*> BufferTable::FindManager(absl::string_view secret) {
  const auto it = managers_.find(secret);
  if (it == managers_.end()) {
    return absl::NotFoundError(
        "unknown manager secret: attach again (the process that issued it "
        "is gone, or the lease ended)");
  }
  return it->second.get();
}

absl::StatusOr<BufferTable::Allocation*> BufferTable::FindAllocation(absl::string_view secret,
                                                                     uint64_t allocation_id) {
  WAVEKV_RETURN_IF_ERROR(FindManager(secret).status());
  const auto it = allocations_.find(allocation_id);
  if (it == allocations_.end() || it->second->manager_secret != secret) {
    return absl::NotFoundError(absl::StrCat("unknown allocation ", allocation_id));
  }
  return it->second.get();
}

absl::StatusOr<std::string> BufferTable::AttachManager(absl::string_view name,
                                                       int64_t claimed_pid) {
  WAVEKV_RETURN_IF_ERROR(CheckName("manager_name", name));
  auto manager = std::make_unique<Manager>();
  manager->secret = RandomSecret();
  manager->name = std::string(name);
  manager->lease_ends_ms = clock_->NowMs() + options_.lease_ms;
  const std::string secret = manager->secret;
  {
    MutexLock lock(&mutex_);
    if (managers_.size() >= options_.managers_max) {
      return absl::ResourceExhaustedError(
          absl::StrCat("all ", options_.managers_max, " managers are attached: ", Holders()));
    }
    managers_[secret] = std::move(manager);
  }
  Log(LogLevel::kInfo, "manager_attached", {{"name", name}, {"claimed_pid", claimed_pid}});
  return secret;
}

absl::Status BufferTable::Heartbeat(absl::string_view secret) {
  MutexLock lock(&mutex_);
  WAVEKV_ASSIGN_OR_RETURN(Manager * manager, FindManager(secret));
  manager->lease_ends_ms = clock_->NowMs() + options_.lease_ms;
  manager->stalled = false;
  return absl::OkStatus();
}

std::string BufferTable::Holders() const {
  std::vector<std::string> parts;
  for (const auto& [id, allocation] : allocations_) {
    if (parts.size() == kHoldersNamedMax) {
      parts.push_back("...");
      break;
    }
    parts.push_back(absl::StrCat(allocation->tenant, " holds ", allocation->memory->bytes()));
  }
  if (lingering_bytes_ > 0) {
    parts.push_back(absl::StrCat("readers of released buffers hold ", lingering_bytes_));
  }
  if (memory_->overhead_bytes() > 0) {
    parts.push_back(absl::StrCat("the device's context holds ", memory_->overhead_bytes()));
  }
  return parts.empty() ? "nobody holds memory" : absl::StrJoin(parts, ", ");
}

absl::Status BufferTable::ReserveBytes(absl::string_view tenant, uint64_t bytes) {
  if (allocations_.size() >= options_.allocations_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", options_.allocations_max, " allocations are taken"));
  }
  const uint64_t free_bytes = options_.bytes_max - bytes_used_;
  if (bytes > free_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "wave buffer of ", tenant, ": asked for ", bytes, " bytes, ", free_bytes, " of ",
        options_.bytes_max, " are free (", Holders(), "); raise wavebufferd's --bytes_max"));
  }
  bytes_used_ += bytes;
  return absl::OkStatus();
}

absl::StatusOr<AllocationGrant> BufferTable::Allocate(absl::string_view secret,
                                                      absl::string_view tenant, uint64_t bytes) {
  WAVEKV_RETURN_IF_ERROR(CheckName("tenant", tenant));
  if (bytes == 0 || bytes > options_.bytes_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("wave buffer of ", tenant, ": asked for ", bytes, " bytes, expected 1 to ",
                     options_.bytes_max, "; raise wavebufferd's --bytes_max"));
  }
  const uint64_t unit = memory_->allocation_unit_bytes();
  const uint64_t rounded = (bytes + unit - 1) / unit * unit;
  {
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(FindManager(secret).status());
    WAVEKV_RETURN_IF_ERROR(ReserveBytes(tenant, rounded));
  }
  // Without the lock: a device may take its time.
  auto memory = memory_->Allocate("wavekv_wave_buffer", rounded);
  MutexLock lock(&mutex_);
  absl::Status status = memory.status();
  if (status.ok()) status = FindManager(secret).status();  // It may be gone by now.
  if (!status.ok()) {
    bytes_used_ -= rounded;
    return status;
  }
  auto allocation = std::make_unique<Allocation>();
  allocation->id = next_allocation_id_++;
  allocation->manager_secret = std::string(secret);
  allocation->tenant = std::string(tenant);
  allocation->memory = *std::move(memory);
  allocation->manager_ticket = RandomSecret();
  const AllocationGrant grant{allocation->id, allocation->manager_ticket, rounded};
  tickets_[grant.manager_ticket] = {grant.id, /*manager=*/true, -1};
  allocations_[grant.id] = std::move(allocation);
  return grant;
}

absl::StatusOr<std::string> BufferTable::IssueTicket(absl::string_view secret,
                                                     uint64_t allocation_id, int64_t client_uid) {
  if (client_uid < -1 || client_uid > int64_t{0xfffffffe}) {
    return absl::InvalidArgumentError(
        absl::StrCat("client_uid is ", client_uid, ", expected -1 (any) or a user id"));
  }
  MutexLock lock(&mutex_);
  WAVEKV_ASSIGN_OR_RETURN(Allocation * allocation, FindAllocation(secret, allocation_id));
  const auto found = allocation->client_tickets.find(client_uid);
  if (found != allocation->client_tickets.end()) return found->second;
  if (allocation->client_tickets.size() >= options_.tickets_per_allocation_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("allocation ", allocation_id, " has tickets for ",
                     options_.tickets_per_allocation_max, " client uids, which is the most"));
  }
  std::string ticket = RandomSecret();
  allocation->client_tickets[client_uid] = ticket;
  tickets_[ticket] = {allocation_id, /*manager=*/false, client_uid};
  return ticket;
}

absl::Status BufferTable::Seal(absl::string_view secret, uint64_t allocation_id) {
  MutexLock lock(&mutex_);
  WAVEKV_ASSIGN_OR_RETURN(Allocation * allocation, FindAllocation(secret, allocation_id));
  if (allocation->sealed) return absl::OkStatus();
  if (!allocation->fetched) {
    return absl::FailedPreconditionError(
        absl::StrCat("allocation ", allocation_id,
                     " was not fetched by its manager: once sealed, it could never be written"));
  }
  WAVEKV_RETURN_IF_ERROR(allocation->memory->Seal());
  allocation->sealed = true;
  return absl::OkStatus();
}

void BufferTable::DropAllocation(uint64_t allocation_id) {
  const auto it = allocations_.find(allocation_id);
  WAVEKV_CHECK(it != allocations_.end(), "dropping an allocation that is there");
  Allocation& allocation = *it->second;
  tickets_.erase(allocation.manager_ticket);
  for (const auto& [uid, ticket] : allocation.client_tickets) tickets_.erase(ticket);
  allocation.memory->Drop();
  lingering_bytes_ += allocation.memory->bytes();
  lingering_.push_back(std::move(allocation.memory));
  allocations_.erase(it);
}

absl::Status BufferTable::Release(absl::string_view secret, uint64_t allocation_id) {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(FindAllocation(secret, allocation_id).status());
  DropAllocation(allocation_id);
  ReapReaders();
  return absl::OkStatus();
}

absl::StatusOr<Redeemed> BufferTable::Redeem(absl::string_view ticket, const PeerCredentials& peer,
                                             UniqueFd peer_process) {
  const absl::Status unknown = absl::NotFoundError("unknown ticket");
  MutexLock lock(&mutex_);
  const auto it = tickets_.find(ticket);
  if (it == tickets_.end()) return unknown;
  const Ticket found = it->second;
  Allocation& allocation = *allocations_.at(found.allocation_id);
  if (!found.manager) {
    if (found.client_uid != -1 && static_cast<uid_t>(found.client_uid) != peer.uid) return unknown;
    if (!allocation.sealed) {
      return absl::FailedPreconditionError("the buffer is not sealed yet; ask again");
    }
    WAVEKV_ASSIGN_OR_RETURN(UniqueFd fd, allocation.memory->ReadOnlyDescriptor());
    WAVEKV_ASSIGN_OR_RETURN(auto holder, allocation.memory->NewHolder());
    return Redeemed(std::move(fd), std::move(holder), std::move(peer_process));
  }
  if (peer.uid != 0 && peer.uid != ::geteuid()) return unknown;
  WAVEKV_ASSIGN_OR_RETURN(UniqueFd fd, allocation.memory->WritableDescriptor());
  Manager& manager = *managers_.at(allocation.manager_secret);
  if (!manager.process.valid()) manager.process = std::move(peer_process);
  allocation.fetched = true;
  tickets_.erase(it);
  allocation.manager_ticket.clear();
  return Redeemed(std::move(fd));
}

void BufferTable::Reap() {
  std::vector<ReapedManager> reaped;
  {
    MutexLock lock(&mutex_);
    reaped = ReapManagers();
    ReapReaders();
  }
  for (const ReapedManager& manager : reaped) {
    if (manager.gone) {
      Log(LogLevel::kWarning, "manager_gone",
          {{"name", manager.name}, {"released_bytes", manager.released_bytes}});
    } else {
      Log(LogLevel::kWarning, "manager_stalled",
          {{"name", manager.name}, {"lease_ms", options_.lease_ms}});
    }
  }
}

std::vector<BufferTable::ReapedManager> BufferTable::ReapManagers() {
  const int64_t now_ms = clock_->NowMs();
  std::vector<ReapedManager> reaped;
  std::vector<std::string> gone;
  for (const auto& [secret, manager] : managers_) {
    const bool lease_over = now_ms >= manager->lease_ends_ms;
    if (IsDead(manager->process) || (lease_over && !manager->process.valid())) {
      gone.push_back(secret);
    } else if (lease_over && !manager->stalled) {
      manager->stalled = true;
      reaped.push_back({manager->name, /*gone=*/false, 0});
    }
  }
  for (const std::string& secret : gone) {
    ReapedManager entry{managers_.at(secret)->name, /*gone=*/true, 0};
    std::vector<uint64_t> held;
    for (const auto& [id, allocation] : allocations_) {
      if (allocation->manager_secret != secret) continue;
      held.push_back(id);
      entry.released_bytes += allocation->memory->bytes();
    }
    for (const uint64_t id : held) DropAllocation(id);
    managers_.erase(secret);
    reaped.push_back(std::move(entry));
  }
  return reaped;
}

void BufferTable::ReapReaders() {
  uint64_t freed_bytes = 0;
  std::erase_if(lingering_, [&freed_bytes](const std::shared_ptr<DeviceAllocation>& memory) {
    if (memory->HeldByReaders()) return false;
    freed_bytes += memory->bytes();
    return true;
  });
  bytes_used_ -= freed_bytes;
  lingering_bytes_ -= freed_bytes;
  wiped_bytes_ += freed_bytes;
}

BufferUsage BufferTable::Usage() const {
  MutexLock lock(&mutex_);
  return {options_.bytes_max,
          bytes_used_,
          lingering_bytes_,
          memory_->overhead_bytes(),
          wiped_bytes_,
          static_cast<uint32_t>(allocations_.size()),
          static_cast<uint32_t>(managers_.size())};
}

}  // namespace wavekv
