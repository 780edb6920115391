// How often blocks were asked for: what the policy that goes by it keeps (block_cache_policy.h).
// None of it is thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "storage/block_cache_policy.h"

namespace wavekv {

// How often blocks were looked up, older look-ups counting less: the log2 of a sum of
// 2^(time of the look-up / half-life). All counts fade alike, so none changes but by a look-up.
class FadingCounts {
 public:
  // In look-ups of any block.
  explicit FadingCounts(double half_life) : half_life_(half_life) {}

  void NextLookup() { ++lookups_; }
  // One look-up alone, now.
  double Once() const { return static_cast<double>(lookups_) / half_life_; }
  // A count and one look-up more, now; never less than the count.
  double Add(double count) const;

 private:
  const double half_life_;
  uint64_t lookups_ = 0;
};

// Counts of blocks that are not cached: at most `keys_max`, those that were put last.
class CountHistory {
 public:
  explicit CountHistory(size_t keys_max) : keys_max_(keys_max) {}

  // The count of `key`, which is now the one put last, to be changed; null: none is kept. Valid
  // until the next call.
  double* Renew(const BlockKey& key);
  // Of a key that has none.
  void Put(const BlockKey& key, double count);
  // Forgets it, `otherwise` when none is kept.
  double Take(const BlockKey& key, double otherwise);

 private:
  static constexpr uint32_t kNone = ~0u;
  struct Entry {
    BlockKey key;
    double count = 0;
    uint32_t older = kNone, newer = kNone;
  };
  void PushNewest(uint32_t idx);
  void Unlink(uint32_t idx);

  const size_t keys_max_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> unused_;  // Of entries_.
  uint32_t oldest_ = kNone, newest_ = kNone;
  absl::flat_hash_map<BlockKey, uint32_t> by_key_;
};

// Slots by their counts, which grow while they are in it; of equal ones the lower slot comes first.
// A heap of what the counts once were: growing costs nothing, and only slots that come up for the
// least are put where they belong by now.
class LeastCountedSlots {
 public:
  // `counts` [slot_count] are the caller's and outlive it.
  explicit LeastCountedSlots(const std::vector<double>* counts);

  bool empty() const { return heap_.empty(); }
  bool contains(uint32_t slot) const { return places_[slot] != kNowhere; }
  void Insert(uint32_t slot);
  void Erase(uint32_t slot);
  // The least; not empty.
  uint32_t Least();
  // Likewise, and takes it out.
  uint32_t TakeLeast();

 private:
  struct Entry {
    double count = 0;  // At most the slot's.
    uint32_t slot = 0;
    friend auto operator<=>(const Entry&, const Entry&) = default;
  };
  static constexpr uint32_t kNowhere = ~0u;
  void Place(size_t at, const Entry& entry);
  void Up(size_t at, const Entry& entry);
  void Down(size_t at, const Entry& entry);

  const std::vector<double>& counts_;
  std::vector<Entry> heap_;
  std::vector<uint32_t> places_;  // [slot_count] in heap_, or kNowhere.
};

}  // namespace wavekv
