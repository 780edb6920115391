#include "storage/block_cache_policy.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

constexpr uint64_t kAllDone = ~uint64_t{0};

struct PolicyKind {
  const char* name;
  std::unique_ptr<BlockCachePolicy> (*make)(uint32_t slot_count);
};

constexpr PolicyKind kLru = {"Lru", MakeLruBlockCachePolicy};
constexpr PolicyKind kLrfu = {"Lrfu", MakeLrfuBlockCachePolicy};

void PrintTo(const PolicyKind& kind, std::ostream* out) { *out << kind.name; }

// What is the same in every policy.
class BlockCachePolicyTest : public testing::TestWithParam<PolicyKind> {};

INSTANTIATE_TEST_SUITE_P(All, BlockCachePolicyTest, testing::Values(kLru, kLrfu),
                         [](const auto& info) { return info.param.name; });

TEST_P(BlockCachePolicyTest, FilledSlotsAreFoundAndOthersNot) {
  auto policy = GetParam().make(2);
  const BlockKey key{7, 3};
  EXPECT_EQ(policy->Lookup(key, 1), std::nullopt);
  const auto slot = policy->Admit(key, 0);
  ASSERT_TRUE(slot.has_value());
  EXPECT_EQ(policy->Lookup(key, 1), std::nullopt) << "half-filled slots are not seen";
  EXPECT_EQ(policy->Admit(key, 0), std::nullopt) << "it is on its way already";
  EXPECT_TRUE(policy->Publish(*slot));
  EXPECT_EQ(policy->Lookup(key, 1), slot);
  EXPECT_EQ(policy->Admit(key, 0), std::nullopt) << "it is there already";
  EXPECT_EQ(policy->Lookup({7, 4}, 1), std::nullopt);
  EXPECT_EQ(policy->Lookup({8, 3}, 1), std::nullopt);
  EXPECT_EQ(policy->counters().hits, 1u);
  EXPECT_EQ(policy->counters().misses, 4u);
  EXPECT_EQ(policy->counters().admitted, 1u);
  EXPECT_EQ(policy->block_count(), 1u);
}

TEST_P(BlockCachePolicyTest, SlotsOfUnfinishedStepsStay) {
  auto policy = GetParam().make(1);
  ASSERT_TRUE(policy->Publish(*policy->Admit({1, 0}, 0)));
  ASSERT_TRUE(policy->Lookup({1, 0}, 5).has_value());
  EXPECT_EQ(policy->Admit({1, 1}, 4), std::nullopt) << "step 5 may still read the slot";
  EXPECT_EQ(policy->counters().refused, 1u);
  EXPECT_TRUE(policy->Lookup({1, 0}, 5).has_value()) << "a refusal evicts nothing";
  EXPECT_TRUE(policy->Admit({1, 1}, 5).has_value());
  EXPECT_EQ(policy->counters().evicted, 1u);
  EXPECT_EQ(policy->Lookup({1, 0}, 6), std::nullopt);
}

TEST_P(BlockCachePolicyTest, SlotsBeingFilledAreNotGivenAway) {
  auto policy = GetParam().make(1);
  ASSERT_TRUE(policy->Admit({1, 0}, 0).has_value());
  EXPECT_EQ(policy->Admit({1, 1}, kAllDone), std::nullopt);
  policy->EraseSegment(1);
  EXPECT_EQ(policy->Admit({2, 0}, kAllDone), std::nullopt) << "the copy still writes to it";
}

TEST_P(BlockCachePolicyTest, FillOfAnErasedSegmentIsNotPublished) {
  auto policy = GetParam().make(1);
  const auto slot = policy->Admit({1, 0}, 0);
  policy->EraseSegment(1);
  EXPECT_FALSE(policy->Publish(*slot));
  EXPECT_EQ(policy->Lookup({1, 0}, 1), std::nullopt);
  EXPECT_EQ(policy->Admit({2, 0}, 0), slot) << "no step ever saw it: free at once";
}

TEST_P(BlockCachePolicyTest, FailedFillFreesTheSlot) {
  auto policy = GetParam().make(1);
  const auto slot = policy->Admit({1, 0}, 0);
  EXPECT_FALSE(policy->Publish(*slot, /*filled=*/false));
  EXPECT_EQ(policy->Lookup({1, 0}, 1), std::nullopt);
  EXPECT_EQ(policy->Admit({1, 0}, 0), slot) << "the same block may try again";
}

TEST_P(BlockCachePolicyTest, ErasedSlotsWaitForTheirReaders) {
  auto policy = GetParam().make(2);
  ASSERT_TRUE(policy->Publish(*policy->Admit({1, 0}, 0)));
  ASSERT_TRUE(policy->Publish(*policy->Admit({1, 1}, 0)));
  ASSERT_TRUE(policy->Lookup({1, 0}, 9).has_value());
  policy->EraseSegment(1);
  policy->EraseSegment(1);
  policy->EraseSegment(12345);
  EXPECT_EQ(policy->block_count(), 0u);
  EXPECT_EQ(policy->counters().erased, 2u);
  EXPECT_EQ(policy->Admit({2, 0}, 8), std::nullopt);
  EXPECT_TRUE(policy->Admit({2, 0}, 9).has_value());
}

TEST_P(BlockCachePolicyTest, AdoptedSlotsAreFound) {
  auto policy = GetParam().make(3);
  EXPECT_TRUE(policy->Adopt({1, 0}, 2));
  EXPECT_EQ(policy->Lookup({1, 0}, 1), 2u);
  EXPECT_FALSE(policy->Adopt({1, 0}, 1)) << "slot 2 has it";
  ASSERT_TRUE(policy->Admit({1, 1}, 0).has_value());
  EXPECT_FALSE(policy->Adopt({1, 1}, 1)) << "it is on its way elsewhere";
  EXPECT_EQ(policy->block_count(), 1u);
  EXPECT_EQ(policy->counters().adopted, 1u);
  EXPECT_TRUE(policy->Adopt({1, 2}, 1)) << "a refusal takes no slot";
}

TEST_P(BlockCachePolicyTest, EvictNamesWhatIsWorthLeast) {
  auto policy = GetParam().make(3);
  EXPECT_EQ(policy->Evict(kAllDone), std::nullopt) << "nothing is filled";
  for (uint32_t block = 0; block < 3; ++block) ASSERT_TRUE(policy->Adopt({1, block}, block));
  for (uint32_t block = 0; block < 3; ++block) {
    ASSERT_TRUE(policy->Lookup({1, 2 - block}, block + 1).has_value());
  }
  EXPECT_EQ(policy->Evict(0), std::nullopt) << "steps may still read all of them";
  EXPECT_EQ(policy->Evict(2), (SlotOfBlock{{1, 2}, 2}));
  EXPECT_EQ(policy->Lookup({1, 2}, 4), std::nullopt);
  EXPECT_EQ(policy->counters().evicted, 1u);
  EXPECT_TRUE(policy->Adopt({2, 7}, 2)) << "it is free";
  EXPECT_EQ(policy->Lookup({2, 7}, 4), 2u);
}

TEST_P(BlockCachePolicyTest, ErasedBlocksAreForgottenOneByOne) {
  auto policy = GetParam().make(3);
  for (uint32_t block = 0; block < 3; ++block) ASSERT_TRUE(policy->Adopt({1, block}, block));
  EXPECT_EQ(policy->Erase({1, 1}), 1u);
  EXPECT_EQ(policy->Erase({1, 1}), std::nullopt);
  EXPECT_EQ(policy->Lookup({1, 1}, 1), std::nullopt);
  EXPECT_EQ(policy->block_count(), 2u);
  EXPECT_TRUE(policy->Adopt({1, 9}, 1)) << "whoever fills slots knows which may be filled";
  policy->EraseSegment(1);
  EXPECT_EQ(policy->block_count(), 0u);
  EXPECT_EQ(policy->counters().erased, 4u);
  const auto slot = policy->Admit({2, 0}, kAllDone);
  ASSERT_TRUE(slot.has_value());
  EXPECT_EQ(policy->Erase({2, 0}), std::nullopt) << "it is not filled yet";
  EXPECT_TRUE(policy->Publish(*slot));
}

TEST_P(BlockCachePolicyTest, NoSlotsMeansNoCache) {
  auto policy = GetParam().make(0);
  EXPECT_EQ(policy->Evict(kAllDone), std::nullopt);
  EXPECT_EQ(policy->Admit({1, 0}, kAllDone), std::nullopt);
  EXPECT_EQ(policy->Lookup({1, 0}, 1), std::nullopt);
}

TEST(LrfuBlockCachePolicyTest, WhatIsAskedForOftenStays) {
  // Three slots: one block is asked for at every step, and others once each.
  auto lru = MakeLruBlockCachePolicy(3);
  auto lrfu = MakeLrfuBlockCachePolicy(3);
  const auto ask = [](BlockCachePolicy& policy, const BlockKey& key, uint64_t step) {
    if (policy.Lookup(key, step).has_value()) return true;
    if (const auto slot = policy.Admit(key, step)) policy.Publish(*slot);
    return false;
  };
  const BlockKey often{1, 0};
  uint64_t step = 0;
  for (uint32_t round = 0; round < 4; ++round) {
    ask(*lru, often, ++step);
    ask(*lrfu, often, step);
  }
  for (uint32_t once = 1; once <= 4; ++once) {
    ask(*lru, {2, once}, ++step);
    ask(*lrfu, {2, once}, step);
  }
  EXPECT_FALSE(ask(*lru, often, ++step));
  EXPECT_TRUE(ask(*lrfu, often, step));
}

TEST(LrfuBlockCachePolicyTest, RemembersWhatGaveWay) {
  auto policy = MakeLrfuBlockCachePolicy(2);
  const auto ask = [&](const BlockKey& key, uint64_t step) {
    if (policy->Lookup(key, step).has_value()) return;
    if (const auto slot = policy->Admit(key, step)) policy->Publish(*slot);
  };
  // {1, 0} is asked for twice, gives way to two others, and comes back: it outlives {1, 3}, which
  // was asked for later but once.
  for (const uint32_t block : {0u, 0u, 1u, 1u, 2u, 2u, 0u, 3u, 4u}) ask({1, block}, block + 1);
  EXPECT_TRUE(policy->Lookup({1, 4}, 20).has_value());
  EXPECT_FALSE(policy->Lookup({1, 3}, 20).has_value());
}

// What is asked for as often as what is missed stays; what was asked for less often goes.
TEST(LrfuBlockCachePolicyTest, EvictWorseComparesWithWhatIsMissed) {
  auto policy = MakeLrfuBlockCachePolicy(2);
  uint64_t step = 0;
  const auto ask = [&](uint32_t block) { (void)policy->Lookup({1, block}, ++step); };
  ASSERT_TRUE(policy->Adopt({1, 0}, 0));
  ASSERT_TRUE(policy->Adopt({1, 1}, 1));
  EXPECT_EQ(policy->EvictWorse(step), std::nullopt) << "nothing was missed yet";
  for (int i = 0; i < 200; ++i) {
    for (const uint32_t block : {2u, 0u, 1u}) ask(block);
  }
  EXPECT_EQ(policy->EvictWorse(step), std::nullopt) << "block 2 is worth no more";
  EXPECT_EQ(policy->EvictWorse(0), std::nullopt) << "both are in use";
  for (int i = 0; i < 200; ++i) {
    for (const uint32_t block : {2u, 0u}) ask(block);
  }
  EXPECT_EQ(policy->EvictWorse(step), (SlotOfBlock{{1, 1}, 1}));
  EXPECT_EQ(policy->EvictWorse(step), std::nullopt) << "block 0 is asked for as often as block 2";
  EXPECT_EQ(policy->block_count(), 1u);
}

TEST(LruBlockCachePolicyTest, EvictWorseTakesTheOldest) {
  auto policy = MakeLruBlockCachePolicy(2);
  ASSERT_TRUE(policy->Adopt({1, 0}, 0));
  ASSERT_TRUE(policy->Lookup({1, 0}, 3).has_value());
  EXPECT_EQ(policy->EvictWorse(2), std::nullopt);
  EXPECT_EQ(policy->EvictWorse(3), (SlotOfBlock{{1, 0}, 0}));
}

// Blocks in use that came up for eviction are passed over, and come up again once they are not.
TEST(LrfuBlockCachePolicyTest, HoweverManyAreInUseTheOthersAreFound) {
  constexpr uint32_t kSlots = 300;
  auto policy = MakeLrfuBlockCachePolicy(kSlots);
  for (uint32_t i = 0; i < kSlots; ++i) ASSERT_TRUE(policy->Adopt({1, i}, i));
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(policy->Lookup({1, kSlots - 1}, 1).has_value());
  for (uint32_t i = 0; i + 1 < kSlots; ++i) ASSERT_TRUE(policy->Lookup({1, i}, 2).has_value());
  EXPECT_EQ(policy->Evict(1), (SlotOfBlock{{1, kSlots - 1}, kSlots - 1}));
  EXPECT_EQ(policy->Evict(1), std::nullopt);
  EXPECT_EQ(policy->Erase({1, 5}), 5u);
  ASSERT_TRUE(policy->Adopt({2, 5}, 5));
  for (uint32_t left = kSlots - 1; left > 0; --left) ASSERT_TRUE(policy->Evict(2).has_value());
  EXPECT_EQ(policy->block_count(), 0u);
}

// The rules of the header, by search through everything.
class NaivePolicy {
 public:
  // Of the LRFU kind, if `half_life` look-ups are given.
  explicit NaivePolicy(uint32_t slot_count, double half_life)
      : half_life_(half_life), slots_(slot_count) {}

  std::optional<uint32_t> Lookup(const BlockKey& key, uint64_t step) {
    newest_step_ = std::max(newest_step_, step);
    lookups_[{key.segment_uid, key.block}].push_back(++lookup_count_);
    const std::optional<uint32_t> slot = SlotOf(key);
    if (slot.has_value()) {
      slots_[*slot].last_step = step;
      slots_[*slot].used_at = ++now_;
    }
    return slot;
  }

  std::optional<uint32_t> SlotOf(const BlockKey& key) const {
    for (uint32_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].state == kFilled && slots_[i].key == key) return i;
    }
    return std::nullopt;
  }

  bool Knows(const BlockKey& key) const {
    return std::any_of(slots_.begin(), slots_.end(), [&](const Entry& entry) {
      return (entry.state == kFilled || entry.state == kFilling) && entry.key == key;
    });
  }

  // Slots that may be given to a new block: any free one, else one of the victims.
  std::set<uint32_t> Candidates(uint64_t completed_step) const {
    std::set<uint32_t> free;
    for (uint32_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].state == kFree && slots_[i].last_step <= completed_step) free.insert(i);
    }
    return free.empty() ? Victims(completed_step) : free;
  }

  void Fill(uint32_t slot, const BlockKey& key) { slots_[slot] = {key, kFilling, 0, 0}; }

  bool Publish(uint32_t slot, bool filled) {
    Entry& entry = slots_[slot];
    const bool visible = filled && entry.state == kFilling;
    entry.state = visible ? kFilled : kFree;
    entry.last_step = visible ? newest_step_ : 0;
    entry.used_at = ++now_;
    // A block that was never asked for counts as if it had been, once.
    std::vector<uint64_t>& lookups = lookups_[{entry.key.segment_uid, entry.key.block}];
    if (visible && lookups.empty()) lookups.push_back(lookup_count_);
    return visible;
  }

  bool Adopt(uint32_t slot, const BlockKey& key) {
    if (Knows(key)) return false;
    Fill(slot, key);
    return Publish(slot, true);
  }

  bool IsFree(uint32_t slot) const { return slots_[slot].state == kFree; }

  // The block of a slot that gives way, or is forgotten.
  BlockKey Empty(uint32_t slot, bool forgotten) {
    Entry& entry = slots_[slot];
    if (forgotten) lookups_.erase({entry.key.segment_uid, entry.key.block});
    entry.state = kFree;
    entry.last_step = forgotten ? newest_step_ : entry.last_step;
    return entry.key;
  }

  // Filled slots of which one may be emptied.
  std::set<uint32_t> Victims(uint64_t completed_step) const {
    std::set<uint32_t> worst;
    double least = std::numeric_limits<double>::infinity();
    const auto may_go = [&](const Entry& entry) {
      return entry.state == kFilled && entry.last_step <= completed_step;
    };
    for (const Entry& entry : slots_) {
      if (may_go(entry)) least = std::min(least, Worth(entry));
    }
    for (uint32_t i = 0; i < slots_.size(); ++i) {
      // Sums that differ by rounding are the same.
      if (may_go(slots_[i]) && Worth(slots_[i]) <= least + 1e-9 * std::fabs(least)) worst.insert(i);
    }
    return worst;
  }

  void Erase(uint64_t uid) {
    for (Entry& entry : slots_) {
      if (entry.key.segment_uid != uid || entry.state == kFree || entry.state == kAbandoned)
        continue;
      if (entry.state == kFilled) lookups_.erase({uid, entry.key.block});
      if (entry.state == kFilling) entry.state = kAbandoned;
      if (entry.state == kFilled) {
        entry.state = kFree;
        entry.last_step = newest_step_;
      }
    }
  }

  uint32_t FilledCount() const {
    return static_cast<uint32_t>(std::count_if(slots_.begin(), slots_.end(),
                                               [](const Entry& e) { return e.state == kFilled; }));
  }

 private:
  enum State { kFree, kFilling, kAbandoned, kFilled };
  struct Entry {
    BlockKey key;
    State state = kFree;
    uint64_t last_step = 0;
    uint64_t used_at = 0;
  };
  // What gives way last has the most.
  double Worth(const Entry& entry) const {
    if (half_life_ == 0) return static_cast<double>(entry.used_at);
    double count = 0;
    for (const uint64_t at : lookups_.at({entry.key.segment_uid, entry.key.block})) {
      count += std::exp2(-static_cast<double>(lookup_count_ - at) / half_life_);
    }
    return count;
  }

  const double half_life_;
  std::map<std::pair<uint64_t, uint32_t>, std::vector<uint64_t>> lookups_;  // Of each block.
  uint64_t lookup_count_ = 0;
  std::vector<Entry> slots_;
  uint64_t newest_step_ = 0;
  uint64_t now_ = 0;
};

TEST_P(BlockCachePolicyTest, RandomTrafficAgreesWithANaiveModel) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  const bool counts = GetParam().make == kLrfu.make;
  // With 16 slots there are as many remembered as there are blocks.
  for (const uint32_t slot_count : counts ? std::vector{16u, 20u} : std::vector{1u, 3u, 16u}) {
    auto policy = GetParam().make(slot_count);
    NaivePolicy model(slot_count, counts ? 1.5 * slot_count : 0);
    std::vector<uint32_t> filling;
    uint64_t step = 1, completed = 0, asked = 0, hits = 0;
    for (int action = 0; action < 20000; ++action) {
      const BlockKey key{1 + rng() % 5, static_cast<uint32_t>(rng() % 6)};
      switch (rng() % 11) {
        case 0: {
          step += rng() % 2;
          completed += rng() % (step - completed + 1);
          break;
        }
        case 1:
        case 2:
        case 3: {
          const auto expected = model.Lookup(key, step);
          ASSERT_EQ(policy->Lookup(key, step), expected) << "action " << action;
          ++asked;
          hits += expected.has_value();
          break;
        }
        case 4:
        case 5: {
          const auto slot = policy->Admit(key, completed);
          if (model.Knows(key)) {
            ASSERT_EQ(slot, std::nullopt) << "action " << action;
            break;
          }
          const std::set<uint32_t> candidates = model.Candidates(completed);
          ASSERT_EQ(slot.has_value(), !candidates.empty()) << "action " << action;
          if (!slot.has_value()) break;
          ASSERT_TRUE(candidates.contains(*slot)) << "action " << action << " slot " << *slot;
          model.Fill(*slot, key);
          filling.push_back(*slot);
          break;
        }
        case 6: {
          if (filling.empty()) break;
          std::swap(filling[rng() % filling.size()], filling.back());
          const bool filled = rng() % 8 != 0;
          ASSERT_EQ(policy->Publish(filling.back(), filled), model.Publish(filling.back(), filled));
          filling.pop_back();
          break;
        }
        case 7: {
          const auto slot = static_cast<uint32_t>(rng() % slot_count);
          if (!model.IsFree(slot)) break;
          ASSERT_EQ(policy->Adopt(key, slot), model.Adopt(slot, key)) << "action " << action;
          break;
        }
        case 8: {
          const auto evicted = policy->Evict(completed);
          const std::set<uint32_t> victims = model.Victims(completed);
          ASSERT_EQ(evicted.has_value(), !victims.empty()) << "action " << action;
          if (!evicted.has_value()) break;
          ASSERT_TRUE(victims.contains(evicted->slot)) << "action " << action;
          ASSERT_EQ(evicted->key, model.Empty(evicted->slot, /*forgotten=*/false));
          break;
        }
        case 9: {
          const auto expected = model.SlotOf(key);
          ASSERT_EQ(policy->Erase(key), expected) << "action " << action;
          if (expected.has_value()) model.Empty(*expected, /*forgotten=*/true);
          break;
        }
        case 10: {
          if (rng() % 4 != 0) break;
          policy->EraseSegment(key.segment_uid);
          model.Erase(key.segment_uid);
          break;
        }
      }
      const BlockCacheCounters& counters = policy->counters();
      ASSERT_EQ(counters.hits + counters.misses, asked);
      ASSERT_EQ(counters.hits, hits);
      ASSERT_EQ(policy->block_count(), model.FilledCount());
    }
    EXPECT_GT(policy->counters().evicted, 0u);
    EXPECT_GT(policy->counters().erased, 0u);
    EXPECT_GT(hits, 0u);
  }
}

TEST_P(BlockCachePolicyTest, PublishingWhatIsNotBeingFilledAborts) {
  auto policy = GetParam().make(2);
  EXPECT_DEATH(policy->Publish(0), "not being filled");
  EXPECT_DEATH(policy->Publish(2), "no such slot");
  EXPECT_DEATH(policy->Adopt({1, 0}, 2), "no such slot");
  ASSERT_TRUE(policy->Adopt({1, 0}, 0));
  EXPECT_DEATH(policy->Adopt({1, 1}, 0), "not free");
}

}  // namespace
}  // namespace wavekv
