#include "storage/block_cache_slots.h"

#include <algorithm>

#include "storage/base/check.h"

namespace wavekv {

void CacheSlotList::PushBack(uint32_t slot) {
  slots_[slot].previous = back_;
  slots_[slot].next = kNoSlot;
  (back_ == kNoSlot ? front_ : slots_[back_].next) = slot;
  back_ = slot;
}

void CacheSlotList::Remove(uint32_t slot) {
  const CacheSlot& gone = slots_[slot];
  (gone.previous == kNoSlot ? front_ : slots_[gone.previous].next) = gone.next;
  (gone.next == kNoSlot ? back_ : slots_[gone.next].previous) = gone.previous;
}

BlockCacheSlots::BlockCacheSlots(uint32_t slot_count)
    : slots_(slot_count), idle_(&slots_), retired_(&slots_) {
  WAVEKV_CHECK(slot_count < kNoSlot, "a block cache has fewer than 2^32 - 1 slots");
  for (uint32_t slot = 0; slot < slot_count; ++slot) idle_.PushBack(slot);
  by_key_.reserve(slot_count);
}

std::optional<uint32_t> BlockCacheSlots::Lookup(const BlockKey& key, uint64_t step) {
  newest_step_ = std::max(newest_step_, step);
  const auto found = by_key_.find(key);
  if (found == by_key_.end() || slots_[found->second].state != CacheSlot::State::kFilled) {
    ++counters_.misses;
    OnMiss(key);
    return std::nullopt;
  }
  ++counters_.hits;
  const uint32_t slot = found->second;
  slots_[slot].last_step = std::max(slots_[slot].last_step, step);
  OnHit(slot);
  return slot;
}

std::optional<uint32_t> BlockCacheSlots::Admit(const BlockKey& key, uint64_t completed_step) {
  if (by_key_.contains(key)) return std::nullopt;
  const uint32_t slot = TakeSlot(completed_step);
  if (slot == kNoSlot) {
    ++counters_.refused;
    return std::nullopt;
  }
  ++counters_.admitted;
  slots_[slot].key = key;
  slots_[slot].state = CacheSlot::State::kFilling;
  by_key_.emplace(key, slot);
  JoinSegment(slot);
  return slot;
}

bool BlockCacheSlots::Publish(uint32_t slot, bool filled) {
  WAVEKV_CHECK(slot < slots_.size(), "no such slot");
  const CacheSlot::State state = slots_[slot].state;
  WAVEKV_CHECK(state == CacheSlot::State::kFilling || state == CacheSlot::State::kAbandoned,
               "a slot was published that is not being filled");
  if (filled && state == CacheSlot::State::kFilling) {
    Fill(slot);
    return true;
  }
  if (state == CacheSlot::State::kFilling) {
    by_key_.erase(slots_[slot].key);
    LeaveSegment(slot);
  }
  slots_[slot].state = CacheSlot::State::kFree;
  idle_.PushBack(slot);
  return false;
}

void BlockCacheSlots::Fill(uint32_t slot) {
  slots_[slot].state = CacheSlot::State::kFilled;
  // As if the newest step had read it: keeps slots sorted by last_step that are
  // sorted by recency.
  slots_[slot].last_step = newest_step_;
  ++block_count_;
  OnFilled(slot);
}

bool BlockCacheSlots::Adopt(const BlockKey& key, uint32_t slot) {
  WAVEKV_CHECK(slot < slots_.size(), "no such slot");
  const CacheSlot::State state = slots_[slot].state;
  WAVEKV_CHECK(state == CacheSlot::State::kFree || state == CacheSlot::State::kRetired,
               "a slot was adopted that is not free");
  if (!by_key_.try_emplace(key, slot).second) return false;
  (state == CacheSlot::State::kFree ? idle_ : retired_).Remove(slot);
  slots_[slot].key = key;
  JoinSegment(slot);
  ++counters_.adopted;
  Fill(slot);
  return true;
}

std::optional<SlotOfBlock> BlockCacheSlots::Evict(uint64_t completed_step) {
  const uint32_t slot = Victim(completed_step);
  if (slot == kNoSlot) return std::nullopt;
  return Free(slot);
}

std::optional<SlotOfBlock> BlockCacheSlots::EvictWorse(uint64_t completed_step) {
  const uint32_t slot = Victim(completed_step);
  if (slot == kNoSlot || !IsWorse(slot)) return std::nullopt;
  return Free(slot);
}

SlotOfBlock BlockCacheSlots::Free(uint32_t slot) {
  Empty(slot);
  slots_[slot].state = CacheSlot::State::kFree;
  idle_.PushBack(slot);
  return {slots_[slot].key, slot};
}

std::optional<uint32_t> BlockCacheSlots::Erase(const BlockKey& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end() || slots_[found->second].state != CacheSlot::State::kFilled) {
    return std::nullopt;
  }
  const uint32_t slot = found->second;
  by_key_.erase(found);
  LeaveSegment(slot);
  Retire(slot);
  return slot;
}

void BlockCacheSlots::EraseSegment(uint64_t segment_uid) {
  const auto found = by_segment_.find(segment_uid);
  if (found == by_segment_.end()) return;
  uint32_t slot = found->second;
  by_segment_.erase(found);
  while (slot != kNoSlot) {
    CacheSlot& gone = slots_[slot];
    const uint32_t next = gone.segment_next;
    by_key_.erase(gone.key);
    if (gone.state == CacheSlot::State::kFilled) {
      Retire(slot);
    } else {
      gone.state = CacheSlot::State::kAbandoned;  // Whoever fills it still writes to it.
    }
    slot = next;
  }
}

void BlockCacheSlots::Retire(uint32_t slot) {
  OnErased(slot);
  --block_count_;
  ++counters_.erased;
  // Until the newest step is done, at least: keeps the retired list sorted by last_step.
  slots_[slot].state = CacheSlot::State::kRetired;
  slots_[slot].last_step = newest_step_;
  retired_.PushBack(slot);
}

uint32_t BlockCacheSlots::TakeSlot(uint64_t completed_step) {
  if (const uint32_t slot = idle_.front(); slot != kNoSlot) {
    idle_.Remove(slot);
    return slot;
  }
  if (const uint32_t slot = retired_.front();
      slot != kNoSlot && slots_[slot].last_step <= completed_step) {
    retired_.Remove(slot);
    return slot;
  }
  const uint32_t slot = Victim(completed_step);
  if (slot != kNoSlot) Empty(slot);
  return slot;
}

void BlockCacheSlots::Empty(uint32_t slot) {
  OnEvicted(slot);
  by_key_.erase(slots_[slot].key);
  LeaveSegment(slot);
  --block_count_;
  ++counters_.evicted;
}

void BlockCacheSlots::JoinSegment(uint32_t slot) {
  const auto [head, is_new] = by_segment_.try_emplace(slots_[slot].key.segment_uid, slot);
  slots_[slot].segment_previous = kNoSlot;
  slots_[slot].segment_next = is_new ? kNoSlot : head->second;
  if (!is_new) {
    slots_[head->second].segment_previous = slot;
    head->second = slot;
  }
}

void BlockCacheSlots::LeaveSegment(uint32_t slot) {
  const CacheSlot& gone = slots_[slot];
  if (gone.segment_next != kNoSlot) {
    slots_[gone.segment_next].segment_previous = gone.segment_previous;
  }
  if (gone.segment_previous != kNoSlot) {
    slots_[gone.segment_previous].segment_next = gone.segment_next;
  } else if (gone.segment_next != kNoSlot) {
    by_segment_[gone.key.segment_uid] = gone.segment_next;
  } else {
    by_segment_.erase(gone.key.segment_uid);
  }
}

}  // namespace wavekv
