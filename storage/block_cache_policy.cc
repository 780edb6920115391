#include "storage/block_cache_policy.h"

#include <cmath>
#include <list>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
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
  uint32_t Victim(uint64_t completed_step) const override {
    const uint32_t idx = recency_.front();
    return idx != kNoSlot && slot(idx).last_step <= completed_step ? idx : kNoSlot;
  }

 private:
  CacheSlotList recency_;  // Filled slots; front: least recently used.
};

// How often blocks were looked up, older look-ups counting less: the log2 of a sum of
// 2^(time of the look-up / half-life). All counts fade alike, so none changes but by a look-up.
class FadingCounts {
 public:
  explicit FadingCounts(double half_life) : half_life_(half_life) {}

  void NextLookup() { ++lookups_; }
  // One look-up alone, now.
  double Once() const { return static_cast<double>(lookups_) / half_life_; }
  double Add(double count) const {
    const double once = Once(), larger = std::max(once, count);
    return larger + std::log2(std::exp2(once - larger) + std::exp2(count - larger));
  }

 private:
  const double half_life_;
  uint64_t lookups_ = 0;
};

// Counts of blocks that are not cached, those asked for latest.
class CountHistory {
 public:
  explicit CountHistory(size_t keys_max) : keys_max_(keys_max) {}

  void Put(const BlockKey& key, double count) {
    if (keys_max_ == 0) return;
    Take(key);
    if (by_key_.size() == keys_max_) {
      by_key_.erase(by_age_.front().first);
      by_age_.pop_front();
    }
    by_age_.emplace_back(key, count);
    by_key_.emplace(key, std::prev(by_age_.end()));
  }

  std::optional<double> Take(const BlockKey& key) {
    const auto found = by_key_.find(key);
    if (found == by_key_.end()) return std::nullopt;
    const double count = found->second->second;
    by_age_.erase(found->second);
    by_key_.erase(found);
    return count;
  }

 private:
  const size_t keys_max_;
  std::list<std::pair<BlockKey, double>> by_age_;  // Oldest first.
  absl::flat_hash_map<BlockKey, std::list<std::pair<BlockKey, double>>::iterator> by_key_;
};

class LrfuBlockCachePolicy : public BlockCacheSlots {
 public:
  explicit LrfuBlockCachePolicy(uint32_t slot_count)
      : BlockCacheSlots(slot_count),
        counting_(kHalfLife * slot_count),
        history_(kHistory * size_t{slot_count}),
        counts_(slot_count) {}

 protected:
  void OnHit(uint32_t idx) override {
    counting_.NextLookup();
    by_count_.erase({counts_[idx], idx});
    counts_[idx] = counting_.Add(counts_[idx]);
    by_count_.emplace(counts_[idx], idx);
  }
  void OnMiss(const BlockKey& key) override {
    counting_.NextLookup();
    const std::optional<double> count = history_.Take(key);
    history_.Put(key, count.has_value() ? counting_.Add(*count) : counting_.Once());
  }
  void OnFilled(uint32_t idx) override {
    counts_[idx] = history_.Take(slot(idx).key).value_or(counting_.Once());
    by_count_.emplace(counts_[idx], idx);
  }
  void OnEvicted(uint32_t idx) override {
    history_.Put(slot(idx).key, counts_[idx]);
    by_count_.erase({counts_[idx], idx});
  }
  void OnErased(uint32_t idx) override { by_count_.erase({counts_[idx], idx}); }
  uint32_t Victim(uint64_t completed_step) const override {
    uint32_t tried = 0;
    for (auto place = by_count_.begin(); place != by_count_.end() && tried < kVictimsTried;
         ++place, ++tried) {
      if (slot(place->second).last_step <= completed_step) return place->second;
    }
    return kNoSlot;
  }

 private:
  // For each slot. Half-lives of 1 to 2 did best on the traces of docs/performance.md.
  static constexpr double kHalfLife = 1.5;
  static constexpr size_t kHistory = 2;
  static constexpr uint32_t kVictimsTried = 64;

  FadingCounts counting_;
  CountHistory history_;
  std::vector<double> counts_;                      // Of filled slots.
  std::set<std::pair<double, uint32_t>> by_count_;  // The same, with their slots.
};

}  // namespace

std::unique_ptr<BlockCachePolicy> MakeLruBlockCachePolicy(uint32_t slot_count) {
  return std::make_unique<LruBlockCachePolicy>(slot_count);
}

std::unique_ptr<BlockCachePolicy> MakeLrfuBlockCachePolicy(uint32_t slot_count) {
  return std::make_unique<LrfuBlockCachePolicy>(slot_count);
}

}  // namespace wavekv
