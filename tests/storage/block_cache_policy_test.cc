#include "storage/block_cache_policy.h"

#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

constexpr uint64_t kAllDone = ~uint64_t{0};

TEST(BlockCachePolicyTest, FilledSlotsAreFoundAndOthersNot) {
  auto policy = MakeLruBlockCachePolicy(2);
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

TEST(BlockCachePolicyTest, SlotsOfUnfinishedStepsStay) {
  auto policy = MakeLruBlockCachePolicy(1);
  ASSERT_TRUE(policy->Publish(*policy->Admit({1, 0}, 0)));
  ASSERT_TRUE(policy->Lookup({1, 0}, 5).has_value());
  EXPECT_EQ(policy->Admit({1, 1}, 4), std::nullopt) << "step 5 may still read the slot";
  EXPECT_EQ(policy->counters().refused, 1u);
  EXPECT_TRUE(policy->Lookup({1, 0}, 5).has_value()) << "a refusal evicts nothing";
  EXPECT_TRUE(policy->Admit({1, 1}, 5).has_value());
  EXPECT_EQ(policy->counters().evicted, 1u);
  EXPECT_EQ(policy->Lookup({1, 0}, 6), std::nullopt);
}

TEST(BlockCachePolicyTest, SlotsBeingFilledAreNotGivenAway) {
  auto policy = MakeLruBlockCachePolicy(1);
  ASSERT_TRUE(policy->Admit({1, 0}, 0).has_value());
  EXPECT_EQ(policy->Admit({1, 1}, kAllDone), std::nullopt);
  policy->EraseSegment(1);
  EXPECT_EQ(policy->Admit({2, 0}, kAllDone), std::nullopt) << "the copy still writes to it";
}

TEST(BlockCachePolicyTest, FillOfAnErasedSegmentIsNotPublished) {
  auto policy = MakeLruBlockCachePolicy(1);
  const auto slot = policy->Admit({1, 0}, 0);
  policy->EraseSegment(1);
  EXPECT_FALSE(policy->Publish(*slot));
  EXPECT_EQ(policy->Lookup({1, 0}, 1), std::nullopt);
  EXPECT_EQ(policy->Admit({2, 0}, 0), slot) << "no step ever saw it: free at once";
}

TEST(BlockCachePolicyTest, FailedFillFreesTheSlot) {
  auto policy = MakeLruBlockCachePolicy(1);
  const auto slot = policy->Admit({1, 0}, 0);
  EXPECT_FALSE(policy->Publish(*slot, /*filled=*/false));
  EXPECT_EQ(policy->Lookup({1, 0}, 1), std::nullopt);
  EXPECT_EQ(policy->Admit({1, 0}, 0), slot) << "the same block may try again";
}

TEST(BlockCachePolicyTest, ErasedSlotsWaitForTheirReaders) {
  auto policy = MakeLruBlockCachePolicy(2);
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

TEST(BlockCachePolicyTest, NoSlotsMeansNoCache) {
  auto policy = MakeLruBlockCachePolicy(0);
  EXPECT_EQ(policy->Admit({1, 0}, kAllDone), std::nullopt);
  EXPECT_EQ(policy->Lookup({1, 0}, 1), std::nullopt);
}

// The rules of the header, by search through everything.
class NaivePolicy {
 public:
  explicit NaivePolicy(uint32_t slot_count) : slots_(slot_count) {}

  std::optional<uint32_t> Lookup(const BlockKey& key, uint64_t step) {
    newest_step_ = std::max(newest_step_, step);
    for (uint32_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i].state != kFilled || !(slots_[i].key == key)) continue;
      slots_[i].last_step = step;
      slots_[i].used_at = ++now_;
      return i;
    }
    return std::nullopt;
  }

  bool Knows(const BlockKey& key) const {
    return std::any_of(slots_.begin(), slots_.end(), [&](const Entry& entry) {
      return (entry.state == kFilled || entry.state == kFilling) && entry.key == key;
    });
  }

  // Slots that may be given to a new block: any free one, else the least recently used.
  std::set<uint32_t> Candidates(uint64_t completed_step) const {
    std::set<uint32_t> free;
    std::optional<uint32_t> oldest;
    for (uint32_t i = 0; i < slots_.size(); ++i) {
      const Entry& entry = slots_[i];
      if (entry.last_step > completed_step) continue;
      if (entry.state == kFree) free.insert(i);
      if (entry.state == kFilled &&
          (!oldest.has_value() || entry.used_at < slots_[*oldest].used_at)) {
        oldest = i;
      }
    }
    if (free.empty() && oldest.has_value()) free.insert(*oldest);
    return free;
  }

  void Fill(uint32_t slot, const BlockKey& key) { slots_[slot] = {key, kFilling, 0, 0}; }

  bool Publish(uint32_t slot, bool filled) {
    Entry& entry = slots_[slot];
    const bool visible = filled && entry.state == kFilling;
    entry.state = visible ? kFilled : kFree;
    entry.last_step = visible ? newest_step_ : 0;
    entry.used_at = ++now_;
    return visible;
  }

  void Erase(uint64_t uid) {
    for (Entry& entry : slots_) {
      if (entry.key.segment_uid != uid) continue;
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
  std::vector<Entry> slots_;
  uint64_t newest_step_ = 0;
  uint64_t now_ = 0;
};

TEST(BlockCachePolicyTest, RandomTrafficAgreesWithANaiveModel) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  for (const uint32_t slot_count : {1u, 3u, 16u}) {
    auto policy = MakeLruBlockCachePolicy(slot_count);
    NaivePolicy model(slot_count);
    std::vector<uint32_t> filling;
    uint64_t step = 1, completed = 0, asked = 0, hits = 0;
    for (int action = 0; action < 20000; ++action) {
      const BlockKey key{1 + rng() % 5, static_cast<uint32_t>(rng() % 6)};
      switch (rng() % 8) {
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

TEST(BlockCachePolicyDeathTest, PublishingWhatIsNotBeingFilledAborts) {
  auto policy = MakeLruBlockCachePolicy(2);
  EXPECT_DEATH(policy->Publish(0), "not being filled");
  EXPECT_DEATH(policy->Publish(2), "no such slot");
}

}  // namespace
}  // namespace wavekv
