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
  bool IsWorse(uint32_t) const override { return true; }

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
    double missed = counting_.Once();
    if (double* const count = history_.Renew(key); count != nullptr) {
      missed = *count = counting_.Add(*count);
    } else {
      history_.Put(key, missed);
    }
    missed_worth_ += (missed - counting_.Once() - missed_worth_) / kMissesHeard;
  }
  void OnFilled(uint32_t idx) override {
    counts_[idx] = history_.Take(slot(idx).key, counting_.Once());
    by_count_.Insert(idx);
  }
  void OnEvicted(uint32_t idx) override {
    history_.Put(slot(idx).key, counts_[idx]);
    by_count_.Erase(idx);
  }
  void OnErased(uint32_t idx) override {
    if (by_count_.contains(idx)) by_count_.Erase(idx);
  }
  uint32_t Victim(uint64_t completed_step) override {
    if (completed_step != aside_at_) TakeBack(completed_step);
    for (; !by_count_.empty(); aside_.push_back(by_count_.TakeLeast())) {
      const uint32_t least = by_count_.Least();
      if (slot(least).last_step <= completed_step) return least;
    }
    return kNoSlot;
  }
  bool IsWorse(uint32_t idx) const override {
    return counts_[idx] - counting_.Once() < missed_worth_ + kWorse;
  }

 private:
  // For each slot. Half-lives of 1 to 2 did best on the traces of docs/performance.md.
  static constexpr double kHalfLife = 1.5;
  static constexpr size_t kHistory = 2;
  static constexpr double kMissesHeard = 64;  // By missed_worth_.
  static constexpr double kWorse = -0.5;      // log2 of 0.7

  // Slots that were set aside are in the order again, those that are still filled.
  void TakeBack(uint64_t completed_step) {
    for (const uint32_t idx : aside_) {
      const bool filled = slot(idx).state == CacheSlot::State::kFilled;
      if (filled && !by_count_.contains(idx)) by_count_.Insert(idx);
    }
    aside_.clear();
    aside_at_ = completed_step;
  }

  FadingCounts counting_;
  CountHistory history_;        // Of blocks that are not cached.
  std::vector<double> counts_;  // Of filled slots.
  double missed_worth_ = 0;     // log2 of a missed block's count in units of one look-up; a mean.
  LeastCountedSlots by_count_;  // Filled slots, but for those in ...
  // ... which came up for the least while steps after aside_at_ read them. Looked at again at
  // another completed_step; it may name slots that were erased, or filled anew, since.
  std::vector<uint32_t> aside_;
  uint64_t aside_at_ = 0;
};

}  // namespace

std::unique_ptr<BlockCachePolicy> MakeLruBlockCachePolicy(uint32_t slot_count) {
  return std::make_unique<LruBlockCachePolicy>(slot_count);
}

std::unique_ptr<BlockCachePolicy> MakeLrfuBlockCachePolicy(uint32_t slot_count) {
  return std::make_unique<LrfuBlockCachePolicy>(slot_count);
}

}  // namespace wavekv
