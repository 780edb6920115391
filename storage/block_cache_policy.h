// Which blocks lie in which slots of a block cache. Bookkeeping only: whoever owns the slots'
// memory, on a device or in a host buffer, copies the bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

namespace wavekv {

// One block of one segment. A segment's uid is unique in the daemon's life and already stands for
// its sequence, layer and KV head.
struct BlockKey {
  uint64_t segment_uid = 0;
  uint32_t block = 0;

  friend bool operator==(const BlockKey&, const BlockKey&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const BlockKey& key) {
    return H::combine(std::move(h), key.segment_uid, key.block);
  }
};

struct SlotOfBlock {
  BlockKey key;
  uint32_t slot = 0;

  friend bool operator==(const SlotOfBlock&, const SlotOfBlock&) = default;
};

struct BlockCacheCounters {
  uint64_t hits = 0;      // hits + misses = look-ups.
  uint64_t misses = 0;    // Blocks that are being filled count as missed.
  uint64_t admitted = 0;  // Slots handed out to be filled.
  uint64_t refused = 0;   // Admissions that found every slot in use.
  uint64_t adopted = 0;   // Slots that others filled.
  uint64_t evicted = 0;   // Blocks that gave way to others.
  uint64_t erased = 0;    // Blocks that left by themselves or with their segment.
};

// The life of a slot: free -> (Admit) filling -> (Publish) filled -> (eviction or EraseSegment)
// free. A slot that a step may still read is handed out again only once that step is completed.
// Steps are the caller's, counted up. Not thread-safe: the cache's owner holds its lock.
//
// Where others fill the slots (docs/decisions/015-resident-region.md), the caller says what they
// did, free -> (Adopt) filled -> (Evict, Erase or EraseSegment) free, and knows by itself which
// free slots may be filled.
class BlockCachePolicy {
 public:
  virtual ~BlockCachePolicy() = default;

  // The slot that holds `key`, filled, or nullopt. `step` reads it: it stays until a later call's
  // completed_step reaches `step`.
  virtual std::optional<uint32_t> Lookup(const BlockKey& key, uint64_t step) = 0;

  // A slot for the caller to fill with `key`, or nullopt: `key` is there or on its way already, or
  // every slot is being filled or read by a step after `completed_step`.
  virtual std::optional<uint32_t> Admit(const BlockKey& key, uint64_t completed_step) = 0;

  // Ends the filling of a slot that Admit gave. `filled`: the bytes are all there, look-ups find
  // them from now on; otherwise the slot is free again. Returns false when nothing was published,
  // because the copy failed or the segment was erased meanwhile.
  virtual bool Publish(uint32_t slot, bool filled = true) = 0;

  // Takes note that `slot`, free until now, holds `key`: look-ups find it from now on. False, and
  // nothing changes, when another slot holds `key` or is being filled with it.
  virtual bool Adopt(const BlockKey& key, uint32_t slot) = 0;

  // Frees the slot whose block is worth least among those that no step after `completed_step`
  // reads, and says what it held; nullopt: there is none.
  virtual std::optional<SlotOfBlock> Evict(uint64_t completed_step) = 0;

  // Likewise, but only if the block is worth clearly less than those were that were missed lately:
  // a slot may stay empty for a while, and what fills it is any block that is missed.
  virtual std::optional<SlotOfBlock> EvictWorse(uint64_t completed_step) = 0;

  // Forgets one filled block. Steps under way may still read its slot, which is returned; nullopt:
  // no slot is filled with it.
  virtual std::optional<uint32_t> Erase(const BlockKey& key) = 0;

  // Forgets all blocks of a segment. Steps under way may still read them, so their slots are free
  // only once every step known now is completed.
  virtual void EraseSegment(uint64_t segment_uid) = 0;

  virtual uint32_t slot_count() const = 0;
  // Filled slots.
  virtual uint32_t block_count() const = 0;
  virtual const BlockCacheCounters& counters() const = 0;
};

// Least recently used first. Every operation is O(1), EraseSegment O(1) per block of the segment.
// Exact while the steps given to Lookup do not decrease; otherwise an admission may be refused
// although a slot is idle, but a slot in use is never given away. To EvictWorse every block is
// worth less than one that was missed.
std::unique_ptr<BlockCachePolicy> MakeLruBlockCachePolicy(uint32_t slot_count);

// Least often and least recently used first: every look-up of a block counts for it, half as much
// after 1.5 times slot_count look-ups of any block. Blocks that were asked for lately are
// remembered while they are not cached, twice slot_count of them (LRFU: D. Lee et al., "LRFU: a
// spectrum of policies that subsumes the least recently used and least frequently used policies",
// 2001). Clearly less is less than 0.7 of their mean (of the counts' logarithms). Look-ups and
// Adopt are amortised O(1), evictions O(log slot_count), and those that many look-ups came before a
// little more. Passing over a block in use costs O(log slot_count) once for each new
// completed_step.
std::unique_ptr<BlockCachePolicy> MakeLrfuBlockCachePolicy(uint32_t slot_count);

}  // namespace wavekv
