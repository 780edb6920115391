// What all policies share: the life of a slot. What they differ in is which filled slot gives way.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/block_cache_policy.h"

namespace wavekv {

inline constexpr uint32_t kNoSlot = ~0u;

struct CacheSlot {
  // kRetired: free, but steps up to last_step may still read it. kAbandoned: filling, but its
  // segment was erased; nobody will find it.
  enum class State : uint8_t { kFree, kRetired, kFilling, kAbandoned, kFilled };

  BlockKey key;
  uint64_t last_step = 0;  // Last step that may read it.
  State state = State::kFree;
  // In one list; in none while it is being filled.
  uint32_t previous = kNoSlot;
  uint32_t next = kNoSlot;
  // Among the slots of one segment.
  uint32_t segment_previous = kNoSlot;
  uint32_t segment_next = kNoSlot;
};

// Slots chained through `previous` and `next`.
class CacheSlotList {
 public:
  explicit CacheSlotList(std::vector<CacheSlot>* slots) : slots_(*slots) {}

  uint32_t front() const { return front_; }
  void PushBack(uint32_t slot);
  void Remove(uint32_t slot);

 private:
  std::vector<CacheSlot>& slots_;
  uint32_t front_ = kNoSlot;
  uint32_t back_ = kNoSlot;
};

// A policy without its order. Not thread-safe, as BlockCachePolicy.
class BlockCacheSlots : public BlockCachePolicy {
 public:
  explicit BlockCacheSlots(uint32_t slot_count);

  std::optional<uint32_t> Lookup(const BlockKey& key, uint64_t step) final;
  std::optional<uint32_t> Admit(const BlockKey& key, uint64_t completed_step) final;
  bool Publish(uint32_t slot, bool filled) final;
  bool Adopt(const BlockKey& key, uint32_t slot) final;
  std::optional<SlotOfBlock> Evict(uint64_t completed_step) final;
  std::optional<SlotOfBlock> EvictWorse(uint64_t completed_step) final;
  std::optional<uint32_t> Erase(const BlockKey& key) final;
  void EraseSegment(uint64_t segment_uid) final;
  uint32_t slot_count() const final { return static_cast<uint32_t>(slots_.size()); }
  uint32_t block_count() const final { return block_count_; }
  const BlockCacheCounters& counters() const final { return counters_; }

 protected:
  // A look-up found the block in `slot`, or not.
  virtual void OnHit(uint32_t slot) = 0;
  virtual void OnMiss(const BlockKey& key) = 0;
  // `slot` is filled from now on; as if the newest step had read it.
  virtual void OnFilled(uint32_t slot) = 0;
  // `slot` is not filled any more: it gave way to another block, or its segment was erased.
  virtual void OnEvicted(uint32_t slot) = 0;
  virtual void OnErased(uint32_t slot) = 0;
  // The filled slot that gives way: one that no step after `completed_step` reads; kNoSlot: none.
  virtual uint32_t Victim(uint64_t completed_step) = 0;
  // Whether a filled slot's block is worth clearly less than what was missed lately.
  virtual bool IsWorse(uint32_t slot) const = 0;

  const CacheSlot& slot(uint32_t idx) const { return slots_[idx]; }
  std::vector<CacheSlot>* mutable_slots() { return &slots_; }

 private:
  // A slot that no step after `completed_step` reads, belonging to nobody; kNoSlot: none.
  uint32_t TakeSlot(uint64_t completed_step);
  // A filled slot's block gives way, and the slot is nobody's.
  void Empty(uint32_t slot);
  // Likewise, and it is free.
  SlotOfBlock Free(uint32_t slot);
  void Fill(uint32_t slot);
  // A filled slot's block is gone; steps under way may still read it.
  void Retire(uint32_t slot);
  void JoinSegment(uint32_t slot);
  void LeaveSegment(uint32_t slot);

  std::vector<CacheSlot> slots_;
  CacheSlotList idle_;     // Free, and no step can see them.
  CacheSlotList retired_;  // Free, but steps up to last_step may still read them; oldest first.
  absl::flat_hash_map<BlockKey, uint32_t> by_key_;
  absl::flat_hash_map<uint64_t, uint32_t> by_segment_;  // First slot of each segment's chain.
  uint64_t newest_step_ = 0;
  uint32_t block_count_ = 0;
  BlockCacheCounters counters_;
};

}  // namespace wavekv
