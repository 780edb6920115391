// Which blocks lie in which slots of a sequence's block cache, and who still reads them. The truth:
// nothing of it is read back from memory that others can see.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace wavekv {

struct BlockKey {
  uint64_t segment_uid = 0;
  uint32_t block = 0;

  friend bool operator==(const BlockKey&, const BlockKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const BlockKey& key) {
    return H::combine(std::move(h), key.segment_uid, key.block);
  }
};

// Least recently used goes first. A slot that a step handed out stays as it is until that step is
// completed. Not thread-safe.
class BlockCache {
 public:
  explicit BlockCache(uint32_t slot_count);

  // The slot that holds `key`. Moves nothing.
  std::optional<uint32_t> Find(const BlockKey& key) const;
  // The slot was used now, by `step`, which reads it until it is completed; 0: by no reader.
  void Use(uint32_t slot, uint64_t step);

  // Takes a slot for `key`: a free one, or the least recently used one that no step after
  // `completed_step` reads, whose block is forgotten. nullopt: `key` is in the cache or on its way,
  // or every slot that was looked at is being read. Find sees `key` after Publish.
  std::optional<uint32_t> BeginAdmit(const BlockKey& key, uint64_t completed_step);
  // The block's rows are in its slot.
  void Publish(uint32_t slot);

  uint32_t slot_count() const { return static_cast<uint32_t>(slots_.size()); }
  uint32_t slots_used() const { return slots_used_; }  // No slot from here on was ever taken.

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Slot {
    BlockKey key;
    uint64_t last_step = 0;
    bool filling = false;
    uint32_t older = kNone;
    uint32_t newer = kNone;
  };
  std::optional<uint32_t> TakeSlot(uint64_t completed_step);
  void Unlink(uint32_t slot);
  void LinkNewest(uint32_t slot);

  std::vector<Slot> slots_;
  uint32_t slots_used_ = 0;
  uint32_t oldest_ = kNone;
  uint32_t newest_ = kNone;
  absl::flat_hash_map<BlockKey, uint32_t> by_key_;  // Slots that are filling included.
};

}  // namespace wavekv
