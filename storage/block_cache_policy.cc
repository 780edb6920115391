#include "storage/block_cache_policy.h"

#include <algorithm>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

constexpr uint32_t kNoSlot = ~0u;

// kAbandoned: filling, but its segment was erased; nobody will find it.
enum class SlotState : uint8_t { kFree, kFilling, kAbandoned, kFilled };

struct Slot {
  BlockKey key;
  uint64_t last_step = 0;  // Last step that may read it.
  SlotState state = SlotState::kFree;
  // In one of the policy's lists; in none while it is being filled.
  uint32_t previous = kNoSlot;
  uint32_t next = kNoSlot;
  // Among the slots of one segment.
  uint32_t segment_previous = kNoSlot;
  uint32_t segment_next = kNoSlot;
};

// Slots chained through `previous` and `next`.
class SlotList {
 public:
  explicit SlotList(std::vector<Slot>* slots) : slots_(*slots) {}

  uint32_t front() const { return front_; }

  void PushBack(uint32_t slot) {
    slots_[slot].previous = back_;
    slots_[slot].next = kNoSlot;
    (back_ == kNoSlot ? front_ : slots_[back_].next) = slot;
    back_ = slot;
  }

  void Remove(uint32_t slot) {
    const Slot& gone = slots_[slot];
    (gone.previous == kNoSlot ? front_ : slots_[gone.previous].next) = gone.next;
    (gone.next == kNoSlot ? back_ : slots_[gone.next].previous) = gone.previous;
  }

 private:
  std::vector<Slot>& slots_;
  uint32_t front_ = kNoSlot;
  uint32_t back_ = kNoSlot;
};

class LruBlockCachePolicy : public BlockCachePolicy {
 public:
  explicit LruBlockCachePolicy(uint32_t slot_count)
      : slots_(slot_count), idle_(&slots_), retired_(&slots_), recency_(&slots_) {
    WAVEKV_CHECK(slot_count < kNoSlot, "a block cache has fewer than 2^32 - 1 slots");
    for (uint32_t slot = 0; slot < slot_count; ++slot) idle_.PushBack(slot);
    by_key_.reserve(slot_count);
  }

  std::optional<uint32_t> Lookup(const BlockKey& key, uint64_t step) override {
    newest_step_ = std::max(newest_step_, step);
    const auto found = by_key_.find(key);
    if (found == by_key_.end() || slots_[found->second].state != SlotState::kFilled) {
      ++counters_.misses;
      return std::nullopt;
    }
    ++counters_.hits;
    const uint32_t slot = found->second;
    slots_[slot].last_step = std::max(slots_[slot].last_step, step);
    recency_.Remove(slot);
    recency_.PushBack(slot);
    return slot;
  }

  std::optional<uint32_t> Admit(const BlockKey& key, uint64_t completed_step) override {
    if (by_key_.contains(key)) return std::nullopt;
    const uint32_t slot = TakeSlot(completed_step);
    if (slot == kNoSlot) {
      ++counters_.refused;
      return std::nullopt;
    }
    ++counters_.admitted;
    slots_[slot].key = key;
    slots_[slot].state = SlotState::kFilling;
    by_key_.emplace(key, slot);
    JoinSegment(slot);
    return slot;
  }

  bool Publish(uint32_t slot, bool filled) override {
    WAVEKV_CHECK(slot < slots_.size(), "no such slot");
    const SlotState state = slots_[slot].state;
    WAVEKV_CHECK(state == SlotState::kFilling || state == SlotState::kAbandoned,
                 "a slot was published that is not being filled");
    if (filled && state == SlotState::kFilling) {
      slots_[slot].state = SlotState::kFilled;
      // As if the newest step had read it: keeps the recency list sorted by last_step, which lets
      // an admission look at its front alone.
      slots_[slot].last_step = newest_step_;
      recency_.PushBack(slot);
      ++block_count_;
      return true;
    }
    if (state == SlotState::kFilling) {
      by_key_.erase(slots_[slot].key);
      LeaveSegment(slot);
    }
    slots_[slot].state = SlotState::kFree;
    idle_.PushBack(slot);
    return false;
  }

  void EraseSegment(uint64_t segment_uid) override {
    const auto found = by_segment_.find(segment_uid);
    if (found == by_segment_.end()) return;
    uint32_t slot = found->second;
    by_segment_.erase(found);
    while (slot != kNoSlot) {
      Slot& gone = slots_[slot];
      const uint32_t next = gone.segment_next;
      by_key_.erase(gone.key);
      if (gone.state == SlotState::kFilled) {
        recency_.Remove(slot);
        --block_count_;
        ++counters_.erased;
        // Until the newest step is done, at least: keeps the retired list sorted by last_step.
        gone.state = SlotState::kFree;
        gone.last_step = newest_step_;
        retired_.PushBack(slot);
      } else {
        gone.state = SlotState::kAbandoned;  // Whoever fills it still writes to it.
      }
      slot = next;
    }
  }

  uint32_t slot_count() const override { return static_cast<uint32_t>(slots_.size()); }
  uint32_t block_count() const override { return block_count_; }
  const BlockCacheCounters& counters() const override { return counters_; }

 private:
  // A slot that no step after `completed_step` reads, belonging to nobody; kNoSlot: none.
  uint32_t TakeSlot(uint64_t completed_step) {
    if (const uint32_t slot = idle_.front(); slot != kNoSlot) {
      idle_.Remove(slot);
      return slot;
    }
    if (const uint32_t slot = retired_.front();
        slot != kNoSlot && slots_[slot].last_step <= completed_step) {
      retired_.Remove(slot);
      return slot;
    }
    const uint32_t slot = recency_.front();
    if (slot == kNoSlot || slots_[slot].last_step > completed_step) return kNoSlot;
    recency_.Remove(slot);
    by_key_.erase(slots_[slot].key);
    LeaveSegment(slot);
    --block_count_;
    ++counters_.evicted;
    return slot;
  }

  void JoinSegment(uint32_t slot) {
    const auto [head, is_new] = by_segment_.try_emplace(slots_[slot].key.segment_uid, slot);
    slots_[slot].segment_previous = kNoSlot;
    slots_[slot].segment_next = is_new ? kNoSlot : head->second;
    if (!is_new) {
      slots_[head->second].segment_previous = slot;
      head->second = slot;
    }
  }

  void LeaveSegment(uint32_t slot) {
    const Slot& gone = slots_[slot];
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

  std::vector<Slot> slots_;
  SlotList idle_;     // Free, and no step can see them.
  SlotList retired_;  // Free, but steps up to last_step may still read them; oldest first.
  SlotList recency_;  // Filled slots; front: least recently used.
  absl::flat_hash_map<BlockKey, uint32_t> by_key_;
  absl::flat_hash_map<uint64_t, uint32_t> by_segment_;  // First slot of each segment's chain.
  uint64_t newest_step_ = 0;
  uint32_t block_count_ = 0;
  BlockCacheCounters counters_;
};

}  // namespace

std::unique_ptr<BlockCachePolicy> MakeLruBlockCachePolicy(uint32_t slot_count) {
  return std::make_unique<LruBlockCachePolicy>(slot_count);
}

}  // namespace wavekv
