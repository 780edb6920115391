#include "gpu/resident/cache_books.h"

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "storage/base/check.h"

namespace wavekv::resident {
namespace {

using SlotIs = CacheBooks::SlotIs;

constexpr uint64_t kOld = 7, kKept = 8;  // Segments.
constexpr uint32_t kBlocks = 3;          // 0 and 1 are kOld's, 2 is kKept's.

// What steps and the manager share, and one step at a time, in two halves.
class Device {
 public:
  explicit Device(uint32_t slot_count)
      : books_(slot_count, 0), ring_(slot_count), content_(slot_count, -1) {
    table_.fill(-1);
    Round();
  }

  // The step sees whichever segments are live now.
  bool CanBegin(uint32_t block) const { return !wanted_.has_value() && (block == 2 || old_lives_); }
  void Begin(uint32_t block) {
    wanted_ = block;
    ++started_;
    for (; seen_ < free_tail_; ++seen_) {
      const CacheBooks::Offered& offer = ring_[seen_ % ring_.size()];
      if (offer.block >= kBlocks || table_[offer.block] != static_cast<int>(offer.slot)) continue;
      table_[offer.block] = -1;
    }
  }
  bool CanFinish() const { return wanted_.has_value(); }
  // False: it found another block's rows.
  bool Finish() {
    const uint32_t block = *wanted_;
    wanted_.reset();
    const int32_t slot = table_[block];
    bool right = true;
    if (slot >= 0) {
      right = content_[slot] == static_cast<int>(block);
      log_.push_back({block, slot, gpu::kNoPlace});
      ++hits_;
    } else if (free_head_ < seen_) {
      const uint32_t taken = ring_[free_head_ % ring_.size()].slot;
      table_[block] = static_cast<int32_t>(taken);
      content_[taken] = static_cast<int>(block);
      log_.push_back({block | gpu::kMissBit, static_cast<int32_t>(taken), free_head_++});
    } else {
      log_.push_back({block | gpu::kMissBit, -1, gpu::kNoPlace});
    }
    completed_ = started_;
    return right;
  }

  // A round of the manager; `lost`: the log has lapped it.
  void Round(bool lost = false) {
    books_.Read(started_, completed_);
    if (lost && !log_.empty()) {
      books_.HearNothing(free_head_);
    } else {
      for (const gpu::BlockUse& use : log_) Hear(use);
    }
    log_.clear();
    if (books_.wants_table()) {
      books_.ReadTable(table_, [this](uint32_t block) { return OwnerOf(block); });
    }
    books_.Offer();
    Write();
  }
  void Hear(const gpu::BlockUse& use) {
    books_.Hear(use, [this](uint32_t block) { return OwnerOf(block); });
  }
  bool CanLeave() const { return old_lives_; }
  void Leave() {
    old_lives_ = false;
    books_.Leave(kOld, 0, 2);
    Write();
  }

  // What must hold between any two actions; empty when it does.
  std::string Wrong() const {
    for (uint32_t slot = 0; slot < books_.slot_count(); ++slot) {
      int named = 0;
      for (const int32_t entry : table_) named += entry == static_cast<int32_t>(slot);
      if (named > 1) return "two blocks in one slot";
      const SlotIs is = books_.state(slot);
      const bool taken = is == SlotIs::kOffered && IsTaken(slot);
      if (is == SlotIs::kFilled && named == 0) return "a filled slot that nobody finds";
      if (named > 0 && is == SlotIs::kIdle) return "the table names a slot that was taken back";
      if (named > 0 && is == SlotIs::kOffered && !taken && !IsNew(slot)) {
        return "a slot whose offer was seen is in the table";
      }
    }
    if (books_.violations() > 0) return "an honest step was said to lie";
    return "";
  }
  // Once nothing goes on any more, a few rounds leave every slot filled or on offer.
  std::string WrongAtRest() {
    if (CanFinish()) (void)Finish();
    for (int i = 0; i < 4; ++i) Round();
    for (uint32_t slot = 0; slot < books_.slot_count(); ++slot) {
      const SlotIs is = books_.state(slot);
      if (is != SlotIs::kFilled && is != SlotIs::kOffered) return "a slot was lost";
      if (is == SlotIs::kOffered && IsTaken(slot)) return "a claim was never heard of";
    }
    for (uint32_t block = 0; block < 2; ++block) {
      // The next step takes it out; who gets the block's number meanwhile begins without an entry.
      if (old_lives_ || table_[block] < 0 || IsNew(table_[block])) continue;
      return "a block that left is in the table";
    }
    return Wrong();
  }

  CacheBooks& books() { return books_; }
  std::array<int32_t, kBlocks>& table() { return table_; }
  uint64_t hits() const { return hits_; }

 private:
  std::optional<BlockOwner> OwnerOf(uint32_t block) const {
    if (block >= kBlocks) return std::nullopt;
    return block == 2 ? BlockOwner{kKept, true} : BlockOwner{kOld, old_lives_};
  }
  bool IsIn(uint64_t first, uint32_t slot) const {
    for (uint64_t place = first; place < free_tail_; ++place) {
      if (ring_[place % ring_.size()].slot == slot) return true;
    }
    return false;
  }
  bool IsTaken(uint32_t slot) const { return !IsIn(free_head_, slot); }
  bool IsNew(uint32_t slot) const { return IsIn(seen_, slot); }
  void Write() {
    const CacheBooks::Writes writes = books_.TakeWrites();
    for (const uint32_t block : writes.cleared) table_[block] = -1;
    for (const CacheBooks::Offered& offered : writes.offered) {
      WAVEKV_CHECK(offered.place >= free_tail_ && offered.place - free_head_ < ring_.size(),
                   "the ring has room for what is offered");
      ring_[offered.place % ring_.size()] = offered;
      free_tail_ = offered.place + 1;
    }
    WAVEKV_CHECK(free_tail_ == books_.free_tail(), "all that is offered was said");
  }

  CacheBooks books_;
  std::array<int32_t, kBlocks> table_;
  std::vector<CacheBooks::Offered> ring_;
  std::vector<int> content_;  // Block whose rows a slot holds.
  uint64_t free_head_ = 0, seen_ = 0, free_tail_ = 0, started_ = 0, completed_ = 0, hits_ = 0;
  std::vector<gpu::BlockUse> log_;  // Not heard yet.
  std::optional<uint32_t> wanted_;
  bool old_lives_ = true;
};

struct Action {
  const char* name;
  bool (*can)(const Device&);
  bool (*act)(Device*);  // False: a step read wrong rows.
};
const Action kActions[] = {
    {"begin 0", [](const Device& d) { return d.CanBegin(0); },
     [](Device* d) { return d->Begin(0), true; }},
    {"begin 1", [](const Device& d) { return d.CanBegin(1); },
     [](Device* d) { return d->Begin(1), true; }},
    {"begin 2", [](const Device& d) { return d.CanBegin(2); },
     [](Device* d) { return d->Begin(2), true; }},
    {"finish", [](const Device& d) { return d.CanFinish(); },
     [](Device* d) { return d->Finish(); }},
    {"round", [](const Device&) { return true; }, [](Device* d) { return d->Round(), true; }},
    {"lost", [](const Device&) { return true; }, [](Device* d) { return d->Round(true), true; }},
    {"leave", [](const Device& d) { return d.CanLeave(); },
     [](Device* d) { return d->Leave(), true; }},
};
constexpr size_t kActionCount = std::size(kActions);

// Does actions in the order of the digits of `number`; empty when all went well, or when one of
// them cannot be done (`counts` are those that were).
std::string Play(uint32_t slot_count, uint64_t number, int depth, uint64_t* played) {
  Device device(slot_count);
  std::string trace;
  for (int i = 0; i < depth; ++i, number /= kActionCount) {
    const Action& action = kActions[number % kActionCount];
    if (!action.can(device)) return "";
    trace += std::string(action.name) + "; ";
    if (!action.act(&device)) return trace + "a step read another block's rows";
    if (const std::string wrong = device.Wrong(); !wrong.empty()) return trace + wrong;
  }
  ++*played;
  const std::string wrong = device.WrongAtRest();
  return wrong.empty() ? "" : trace + "at rest: " + wrong;
}

TEST(CacheBooksTest, HoldInEveryOrderOfActions) {
  constexpr int kDepth = 7;
  uint64_t orders = 1, played = 0;
  for (int i = 0; i < kDepth; ++i) orders *= kActionCount;
  for (const uint32_t slot_count : {1u, 2u, 3u}) {
    for (uint64_t number = 0; number < orders; ++number) {
      ASSERT_EQ(Play(slot_count, number, kDepth, &played), "") << slot_count << " slots";
    }
  }
  EXPECT_GT(played, 50'000u);
}

TEST(CacheBooksTest, ClaimedBlocksAreFoundAndCounted) {
  Device device(4);
  for (int i = 0; i < 2; ++i) {
    for (uint32_t block = 0; block < kBlocks; ++block) {
      device.Begin(block);
      EXPECT_TRUE(device.Finish());
      device.Round();
    }
  }
  EXPECT_EQ(device.hits(), kBlocks);
  EXPECT_EQ(device.books().policy().counters().hits, kBlocks);
  EXPECT_EQ(device.books().policy().counters().adopted, kBlocks);
}

// Claims that were lost are found in the table, when the steps that made them are over.
TEST(CacheBooksTest, WhatTheTableSaysIsBelieved) {
  Device device(4);
  device.Begin(0);
  EXPECT_TRUE(device.Finish());
  device.Begin(2);
  device.Round(/*lost=*/true);
  EXPECT_TRUE(device.books().doubts());
  EXPECT_EQ(device.books().state(0), SlotIs::kInDoubt);
  device.Round();
  EXPECT_EQ(device.books().state(0), SlotIs::kInDoubt) << "a step is under way";
  EXPECT_TRUE(device.Finish());
  device.Round();
  EXPECT_EQ(device.books().state(0), SlotIs::kFilled);
  EXPECT_EQ(device.Wrong(), "");
}

// A cache that is full offers the slot of what is worth least; the next step takes that block out.
TEST(CacheBooksTest, TheWorstBlockMakesRoom) {
  Device device(2);
  for (const uint32_t block : {0u, 0u, 1u}) {
    device.Begin(block);
    ASSERT_TRUE(device.Finish());
  }
  device.Round();
  EXPECT_EQ(device.books().state(1), SlotIs::kFilled) << "block 1 was asked for in this round";
  device.Begin(0);
  device.Round();
  EXPECT_EQ(device.books().state(1), SlotIs::kFilled) << "and nothing was since";
  ASSERT_TRUE(device.Finish());
  device.Begin(2);
  device.Round();
  EXPECT_EQ(device.books().state(1), SlotIs::kOffered) << "block 1 was asked for once";
  EXPECT_EQ(device.table()[1], 1) << "the step under way may read the slot";
  ASSERT_TRUE(device.Finish());
  EXPECT_EQ(device.table()[2], -1) << "it does not claim what it did not see";
  device.Begin(2);
  EXPECT_EQ(device.table()[1], -1);
  EXPECT_EQ(device.table()[0], 0);
  ASSERT_TRUE(device.Finish());
  EXPECT_EQ(device.table()[2], 1);
}

// Where steps ask for more than there is room for, in turn, a part stays and is found.
TEST(CacheBooksTest, APartStaysOfWhatDoesNotFit) {
  constexpr uint64_t kRounds = 10;
  Device device(2);
  for (uint64_t round = 0; round < kRounds; ++round) {
    for (uint32_t block = 0; block < kBlocks; ++block) {
      device.Begin(block);
      ASSERT_TRUE(device.Finish());
    }
    device.Round();
  }
  EXPECT_EQ(device.hits(), 2 * (kRounds - 1));
}

// Of uses that many newer ones follow only claims are heard.
TEST(CacheBooksTest, OldUsesAreClaimsOnly) {
  CacheBooks books(4, 0);
  books.Offer();
  (void)books.TakeWrites();
  const auto owner_of = [](uint32_t) { return std::optional(BlockOwner{kKept, true}); };
  books.HearOld({7, 0, gpu::kNoPlace}, owner_of);
  books.HearOld({5 | gpu::kMissBit, 2, 2}, owner_of);
  books.HearOld({6 | gpu::kMissBit, -1, gpu::kNoPlace}, owner_of);
  EXPECT_EQ(books.state(2), SlotIs::kFilled);
  EXPECT_EQ(books.policy().counters().hits + books.policy().counters().misses, 0u);
  EXPECT_EQ(books.policy().counters().adopted, 1u);
  EXPECT_EQ(books.violations(), 0u);
}

struct Lie {
  const char* name;
  gpu::BlockUse use;
  uint64_t violations;
};
// Offered are slots 2 and 3 at places 2 and 3; block 0 is in slot 0, block 2 in slot 1.
const Lie kLies[] = {
    {"NoSuchSlot", {1 | gpu::kMissBit, 4, 2}, 1},
    {"NoSuchBlock", {3, 0, gpu::kNoPlace}, 1},
    {"NobodysBlockClaims", {3 | gpu::kMissBit, 2, 2}, 1},
    {"PlaceNeverOffered", {1 | gpu::kMissBit, 2, 4}, 1},
    {"FarPlace", {1 | gpu::kMissBit, 2, gpu::kNoPlace - 1}, 1},
    {"OldPlace", {1 | gpu::kMissBit, 2, 0}, 0},
    {"FilledSlot", {1 | gpu::kMissBit, 0, 0}, 0},
    {"BlockThatIsCached", {0 | gpu::kMissBit, 2, 2}, 1},
    {"LargestNumbers", {~0u, INT32_MAX, ~uint64_t{0}}, 2},
    {"NegativeSlot", {0 | gpu::kMissBit, INT32_MIN, 2}, 0},
};

TEST(CacheBooksTest, LiesAreCountedAndNotFollowed) {
  for (const Lie& lie : kLies) {
    SCOPED_TRACE(lie.name);
    Device device(4);
    for (const uint32_t block : {0u, 2u}) {
      device.Begin(block);
      ASSERT_TRUE(device.Finish());
    }
    device.Round();
    ASSERT_EQ(device.books().state(2), SlotIs::kOffered);
    device.Hear(lie.use);
    EXPECT_EQ(device.books().violations(), lie.violations);
    EXPECT_EQ(device.books().state(1), SlotIs::kFilled);
    EXPECT_EQ(device.books().state(3), SlotIs::kOffered);
    for (int i = 0; i < 3; ++i) device.Round();
    // No honest block was lost to it, but the one it was about.
    EXPECT_EQ(device.table()[2], 1);
  }
}

TEST(CacheBooksTest, ATableThatNamesASlotTwiceIsNotBelieved) {
  Device device(2);
  device.Begin(0);
  ASSERT_TRUE(device.Finish());
  device.Round(/*lost=*/true);
  device.table()[2] = 0;
  device.Round();
  EXPECT_EQ(device.books().violations(), 1u);
  EXPECT_EQ(device.table(), (std::array<int32_t, kBlocks>{-1, -1, -1}));
  EXPECT_EQ(device.books().state(0), SlotIs::kOffered);
}

}  // namespace
}  // namespace wavekv::resident
