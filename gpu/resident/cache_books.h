// The books of one unit's block cache, whose slots only steps fill
// (docs/decisions/015-resident-region.md, "How the cache is kept"). Bookkeeping: touches no memory.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gpu/kernels/step_layout.h"
#include "storage/block_cache_policy.h"

namespace wavekv::resident {

// Whose a block's number is.
struct BlockOwner {
  uint64_t segment_uid = 0;
  bool live = false;  // Else the segment has left the index, and steps of older versions end.
};
// Nullopt: nobody's.
using OwnerOfBlock = absl::FunctionRef<std::optional<BlockOwner>(uint32_t block)>;

// What follows from the log, from readings of the state and from the table is kept here; what is to
// be written is taken out by the caller, who writes all of it before the next reading. Everything
// heard may be a lie. Not thread-safe.
class CacheBooks {
 public:
  // kIdle: to be offered, and in no table once what is in `cleared` was written.
  enum class SlotIs : uint8_t { kIdle, kOffered, kFilled, kInDoubt };

  // The ring of free slots has as many places as there are slots; `free_tail` were offered before.
  CacheBooks(uint32_t slot_count, uint64_t free_tail);

  // A reading of the state that began after all that was taken out before was written.
  void Read(uint64_t started, uint64_t completed);

  // The next entry of the log.
  void Hear(const gpu::BlockUse& use, OwnerOfBlock owner_of);
  // Likewise, if many newer ones follow: what a policy makes of an old use is not worth its time,
  // but claims must be heard.
  void HearOld(const gpu::BlockUse& use, OwnerOfBlock owner_of);

  // Entries of the log were lost before they were heard. Slots offered at places below `free_head`,
  // which was read since, may be taken.
  void HearNothing(uint64_t free_head);

  // Whether slots in doubt can be judged by the table [block_count], read after the last Read.
  bool wants_table() const;
  void ReadTable(std::span<const int32_t> table, OwnerOfBlock owner_of);

  // Blocks [first, first + count) of a segment leave the index.
  void Leave(uint64_t segment_uid, uint32_t first, uint32_t count);

  // Ends a round: offers what is idle, and the slots of the blocks that are worth least, so that
  // somewhat more come to be on offer than blocks were missed. What Hear was told of when it was
  // told last keeps its slot: where steps ask for more than the cache holds, a block in the place
  // of another would only be missed less by as much as that one is missed more.
  void Offer();

  struct Offered {
    uint64_t place = 0;  // In the ring: of all ever offered.
    uint32_t slot = 0;
    uint32_t block = gpu::kNoBlock;  // That leaves the table for it.
  };
  // What is to be written: -1 into the table for each of `cleared`; each offer into the ring, then
  // how many there were.
  struct Writes {
    std::vector<uint32_t> cleared;
    std::vector<Offered> offered;
  };
  Writes TakeWrites();

  uint64_t free_tail() const { return free_tail_; }
  // Whether slots are in doubt.
  bool doubts() const { return !doubtful_.empty(); }
  SlotIs state(uint32_t slot) const { return slots_[slot].is; }
  uint32_t slot_count() const { return static_cast<uint32_t>(slots_.size()); }
  uint64_t violations() const { return violations_; }
  const BlockCachePolicy& policy() const { return *policy_; }

 private:
  static constexpr uint64_t kUnknown = ~uint64_t{0};
  struct Slot {
    SlotIs is = SlotIs::kIdle;
    uint64_t place = 0;         // Of its last offer.
    uint32_t block = 0;         // kFilled.
    uint64_t epoch = kUnknown;  // kInDoubt: what must be completed; of the next reading.
    bool judged = false;        // kInDoubt: the epoch has passed.
  };

  void HearClaim(const gpu::BlockUse& use, OwnerOfBlock owner_of);
  void Adopt(uint32_t slot, uint32_t block, uint64_t segment_uid);
  // Nobody finds `slot` in the table any more, or will once what is in `cleared` was written. A
  // step that found it there reads it before the next one may fill it.
  void TakeBack(uint32_t slot);
  void OfferSlot(uint32_t slot, uint32_t block);
  void Clear(uint32_t block) { writes_.cleared.push_back(block); }
  // Takes back all entries that name a slot in doubt, but for the one that is believed.
  void Judge(uint32_t slot, std::span<const uint32_t> blocks, OwnerOfBlock owner_of);

  std::vector<Slot> slots_;
  std::vector<uint32_t> idle_, doubtful_;
  uint32_t offered_count_ = 0;  // As far as was heard.
  uint64_t free_tail_;
  uint64_t missed_ = 0;       // Blocks, in this round ...
  uint64_t demand_ = 0;       // ... and in rounds before, fading.
  uint64_t round_ = 1;        // In which uses were heard: the policy's steps.
  bool heard_ = false;        // In this one.
  uint64_t completed_ = 0;    // Epoch, of the last reading; ...
  uint64_t round_steps_ = 1;  // ... and how many since the one before.
  uint64_t violations_ = 0;
  Writes writes_;
  const std::unique_ptr<BlockCachePolicy> policy_;
};

}  // namespace wavekv::resident
