#include "daemon/engine/sequence_registry.h"

#include "absl/strings/str_cat.h"

namespace wavekv {

absl::Status SequenceRegistry::Add(std::shared_ptr<Sequence> sequence) {
  MutexLock lock(&mutex_);
  uint32_t& count = counts_[sequence->tenant()];
  if (count >= sequences_max_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tenant '", sequence->tenant(), "' has ", count, " sequences of at most ",
                     sequences_max_, "; drop some, or raise --sequences_max"));
  }
  ++count;
  const SequenceId id = sequence->id();
  sequences_.emplace(id, std::move(sequence));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Sequence>> SequenceRegistry::Find(const TenantId& tenant,
                                                                 SequenceId id) const {
  {
    MutexLock lock(&mutex_);
    const auto found = sequences_.find(id);
    if (found != sequences_.end() && found->second->tenant() == tenant) return found->second;
  }
  return absl::NotFoundError(absl::StrCat("tenant '", tenant, "' has no sequence ", id.value(),
                                          ": dropped, expired, or never created"));
}

bool SequenceRegistry::Remove(SequenceId id) {
  std::shared_ptr<Sequence>
      removed;  // Destroyed, if this was the last reference, without the lock.
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return false;
  removed = std::move(found->second);
  sequences_.erase(found);
  const auto count = counts_.find(removed->tenant());
  if (--count->second == 0) counts_.erase(count);
  return true;
}

std::shared_ptr<Sequence> SequenceRegistry::OldestEvictable(const TenantId& tenant) const {
  std::shared_ptr<Sequence> oldest;
  for (const std::shared_ptr<Sequence>& sequence : List(tenant, SequenceId(0), UINT32_MAX)) {
    if (!sequence->Evictable()) continue;
    if (oldest == nullptr || sequence->last_use_ms() < oldest->last_use_ms()) oldest = sequence;
  }
  return oldest;
}

std::vector<std::shared_ptr<Sequence>> SequenceRegistry::List(const TenantId& tenant,
                                                              SequenceId after,
                                                              uint32_t limit) const {
  std::vector<std::shared_ptr<Sequence>> listed;
  MutexLock lock(&mutex_);
  for (auto it = sequences_.upper_bound(after); it != sequences_.end() && listed.size() < limit;
       ++it) {
    if (tenant.empty() || it->second->tenant() == tenant) listed.push_back(it->second);
  }
  return listed;
}

std::vector<std::pair<TenantId, uint32_t>> SequenceRegistry::CountByTenant() const {
  MutexLock lock(&mutex_);
  return {counts_.begin(), counts_.end()};
}

}  // namespace wavekv
