#include "proto/shm/arena_allocator.h"

#include <gtest/gtest.h>

#include <map>
#include <random>

#include "proto/shm/channel_layout.h"
#include "tests/shm/seed.h"

namespace wavekv::shm {
namespace {

constexpr uint64_t kBegin = 8192;
constexpr uint64_t kBytes = 64 << 10;

TEST(ArenaAllocatorTest, GivesAllOfItAndTakesItBack) {
  ArenaAllocator arena(kBegin, kBytes);
  EXPECT_EQ(arena.Allocate(kBytes), kBegin);
  EXPECT_EQ(arena.Allocate(1), std::nullopt);
  arena.Free(kBegin, kBytes);
  EXPECT_EQ(arena.free_bytes(), kBytes);
}

TEST(ArenaAllocatorTest, RefusesNothingAndTooMuch) {
  ArenaAllocator arena(kBegin, kBytes);
  EXPECT_EQ(arena.Allocate(0), std::nullopt);
  EXPECT_EQ(arena.Allocate(kBytes + 1), std::nullopt);
  EXPECT_EQ(arena.Allocate(UINT64_MAX), std::nullopt);
}

// Extents never overlap, lie inside, are aligned, and all of it comes back, whatever the order.
TEST(ArenaAllocatorTest, RandomCallsNeverOverlap) {
  std::mt19937_64 random(FreshSeed());
  ArenaAllocator arena(kBegin, kBytes);
  std::map<uint64_t, uint64_t> taken;  // Offset -> bytes asked for.
  for (int i = 0; i < 20'000; ++i) {
    if (random() % 2 == 0 && !taken.empty()) {
      auto victim = std::next(taken.begin(), static_cast<ptrdiff_t>(random() % taken.size()));
      arena.Free(victim->first, victim->second);
      taken.erase(victim);
      continue;
    }
    const uint64_t bytes = 1 + random() % (8 << 10);
    const std::optional<uint64_t> offset = arena.Allocate(bytes);
    if (!offset.has_value()) continue;
    ASSERT_EQ(*offset % kArenaAlignment, 0u);
    ASSERT_GE(*offset, kBegin);
    ASSERT_LE(*offset + bytes, kBegin + kBytes);
    const auto next = taken.lower_bound(*offset);
    if (next != taken.end()) {
      ASSERT_LE(*offset + bytes, next->first);
    }
    if (next != taken.begin()) {
      const auto before = std::prev(next);
      ASSERT_LE(before->first + before->second, *offset);
    }
    taken.emplace(*offset, bytes);
  }
  for (const auto& [offset, bytes] : taken) arena.Free(offset, bytes);
  EXPECT_EQ(arena.free_bytes(), kBytes);
  EXPECT_EQ(arena.Allocate(kBytes), kBegin) << "the free extents did not grow together again";
}

TEST(ArenaAllocatorDeathTest, FreeingTwiceIsOurBug) {
  ArenaAllocator arena(kBegin, kBytes);
  const uint64_t offset = *arena.Allocate(128);
  arena.Free(offset, 128);
  EXPECT_DEATH(arena.Free(offset, 128), "freed twice");
}

}  // namespace
}  // namespace wavekv::shm
