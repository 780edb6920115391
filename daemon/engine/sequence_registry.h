// All sequences of the engine, by id.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/sequence.h"
#include "storage/base/mutex.h"

namespace wavekv {

// Thread-safe. Every call of every tenant passes here, so the lock is held for look-ups only: no
// sequence's lock is taken under it, and none is destroyed.
class SequenceRegistry {
 public:
  explicit SequenceRegistry(uint32_t sequences_max) : sequences_max_(sequences_max) {}

  // ResourceExhausted when the tenant has sequences_max already.
  absl::Status Add(std::shared_ptr<Sequence> sequence);
  // NotFound for an id that is unknown or another tenant's, told apart for nobody.
  absl::StatusOr<std::shared_ptr<Sequence>> Find(const TenantId& tenant, SequenceId id) const;
  // Forgets it. Returns false when it was forgotten already.
  bool Remove(SequenceId id);
  // The least recently used sequence of the tenant that may be evicted, or null.
  std::shared_ptr<Sequence> OldestEvictable(const TenantId& tenant) const;

  // With id > after, ascending, at most `limit`; of all tenants when `tenant` is empty.
  std::vector<std::shared_ptr<Sequence>> List(const TenantId& tenant, SequenceId after,
                                              uint32_t limit) const;
  std::vector<std::pair<TenantId, uint32_t>> CountByTenant() const;

 private:
  const uint32_t sequences_max_;
  mutable Mutex mutex_;
  std::map<SequenceId, std::shared_ptr<Sequence>> sequences_ ABSL_GUARDED_BY(mutex_);
  std::map<TenantId, uint32_t> counts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv
