#include "gpu/block_cache.h"

#include <algorithm>

#include "storage/base/check.h"

namespace wavekv {
namespace {

// Slots that are being read are the youngest; behind this many of them the search gives up.
constexpr uint32_t kVictimSearchMax = 256;

}  // namespace

BlockCache::BlockCache(uint32_t slot_count) : slots_(slot_count) {
  WAVEKV_CHECK(slot_count > 0, "a block cache has slots");
}

std::optional<uint32_t> BlockCache::Find(const BlockKey& key) const {
  const auto it = by_key_.find(key);
  if (it == by_key_.end() || slots_[it->second].filling) return std::nullopt;
  return it->second;
}

void BlockCache::Use(uint32_t slot, uint64_t step) {
  slots_[slot].last_step = std::max(slots_[slot].last_step, step);
  if (slot == newest_) return;
  Unlink(slot);
  LinkNewest(slot);
}

std::optional<uint32_t> BlockCache::BeginAdmit(const BlockKey& key, uint64_t completed_step) {
  if (by_key_.contains(key)) return std::nullopt;
  const std::optional<uint32_t> slot = TakeSlot(completed_step);
  if (!slot.has_value()) return std::nullopt;
  slots_[*slot].key = key;
  slots_[*slot].last_step = 0;
  slots_[*slot].filling = true;
  by_key_[key] = *slot;
  LinkNewest(*slot);
  return slot;
}

void BlockCache::Publish(uint32_t slot) {
  WAVEKV_CHECK(slots_[slot].filling, "a slot is published once");
  slots_[slot].filling = false;
}

std::optional<uint32_t> BlockCache::TakeSlot(uint64_t completed_step) {
  if (slots_used_ < slot_count()) return slots_used_++;
  uint32_t slot = oldest_;
  for (uint32_t looked_at = 0; slot != kNone && looked_at < kVictimSearchMax; ++looked_at) {
    if (!slots_[slot].filling && slots_[slot].last_step <= completed_step) {
      by_key_.erase(slots_[slot].key);
      Unlink(slot);
      return slot;
    }
    slot = slots_[slot].newer;
  }
  return std::nullopt;
}

void BlockCache::Unlink(uint32_t slot) {
  const Slot& entry = slots_[slot];
  (entry.older == kNone ? oldest_ : slots_[entry.older].newer) = entry.newer;
  (entry.newer == kNone ? newest_ : slots_[entry.newer].older) = entry.older;
}

void BlockCache::LinkNewest(uint32_t slot) {
  slots_[slot].older = newest_;
  slots_[slot].newer = kNone;
  (newest_ == kNone ? oldest_ : slots_[newest_].newer) = slot;
  newest_ = slot;
}

}  // namespace wavekv
