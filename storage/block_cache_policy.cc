#include "storage/block_cache_policy.h"

#include <vector>

#include "storage/block_cache_counts.h"
#include "storage/block_cache_slots.h"

namespace wavekv {
namespace {

class LruBlockCachePolicy : public BlockCacheSlots {
 public:
  explicit LruBlockCachePolicy(uint32_t slot_count)
      : BlockCacheSlots(slot_count), recency_(mutable_slots()) {}

 protected:
  void OnHit(uint32_t idx) override {
    recency_.Remove(idx);
    recency_.PushBack(idx);
  }
  void OnMiss(const BlockKey&) override {}
  void OnFilled(uint32_t idx) override { recency_.PushBack(idx); }
  void OnEvicted(uint32_t idx) override { recency_.Remove(idx); }
  void OnErased(uint32_t idx) override { recency_.Remove(idx); }
  uint32_t Victim(uint64_t completed_step) override {
    const uint32_t idx = recency_.front();
    return idx != kNoSlot && slot(idx).last_step <= completed_step ? idx : kNoSlot;
  }

 private:
  CacheSlotList recency_;  // Filled slots; front: least recently used.
};

class LrfuBlockCachePolicy : public BlockCacheSlots {
 public:
  explicit LrfuBlockCachePolicy(uint32_t slot_count)
      : BlockCacheSlots(slot_count),
        counting_(kHalfLife * slot_count),
        history_(kHistory * size_t{slot_count}),
        counts_(slot_count),
        by_count_(&counts_) {}

 protected:
  void OnHit(uint32_t idx) override {
    counting_.NextLookup();
    counts_[idx] = counting_.Add(counts_[idx]);
  }
  void OnMiss(const BlockKey& key) override {
    counting_.NextLookup();
    if (double* const count = history_.Renew(key); count != nullptr) {
      *count = counting_.Add(*count);
    } else {
      history_.Put(key, counting_.Once());
    }
  }
  void OnFilled(uint32_t idx) override {
    counts_[idx] = history_.Take(slot(idx).key, counting_.Once());
    by_count_.Insert(idx);
  }
  void OnEvicted(uint32_t idx) override {
    history_.Put(slot(idx).key, counts_[idx]);
    by_count_.Erase(idx);
  }
  void OnErased(uint32_t idx) override { by_count_.Erase(idx); }
  uint32_t Victim(uint64_t completed_step) override {
    std::vector<uint32_t> in_use;
    uint32_t found = kNoSlot;
    while (found == kNoSlot && !by_count_.empty() && in_use.size() < kVictimsTried) {
      const uint32_t least = by_count_.Least();
      if (slot(least).last_step <= completed_step) {
        found = least;
      } else {
        by_count_.Erase(least);
        in_use.push_back(least);
      }
    }
    for (const uint32_t idx : in_use) by_count_.Insert(idx);
    return found;
  }

 private:
  // For each slot. Half-lives of 1 to 2 did best on the traces of docs/performance.md.
  static constexpr double kHalfLife = 1.5;
  static constexpr size_t kHistory = 2;
  static constexpr uint32_t kVictimsTried = 64;

  FadingCounts counting_;
  CountHistory history_;        // Of blocks that are not cached.
  std::vector<double> counts_;  // Of filled slots.
  LeastCountedSlots by_count_;  // Filled slots.
};

}  // namespace

std::unique_ptr<BlockCachePolicy> MakeLruBlockCachePolicy(uint32_t slot_count) {
  return std::make_unique<LruBlockCachePolicy>(slot_count);
}

std::unique_ptr<BlockCachePolicy> MakeLrfuBlockCachePolicy(uint32_t slot_count) {
  return std::make_unique<LrfuBlockCachePolicy>(slot_count);
}

}  // namespace wavekv
