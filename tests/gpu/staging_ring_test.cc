#include "gpu/staging_ring.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <random>

namespace wavekv {
namespace {

TEST(StagingRingTest, EmptyGivesAllOfItself) {
  StagingRing ring(1000);
  EXPECT_EQ(ring.Largest().begin, 0u);
  EXPECT_EQ(ring.Largest().bytes, 1000u);
  EXPECT_EQ(ring.Take(1, 1000), 0u);
  EXPECT_EQ(ring.Largest().bytes, 0u);
  EXPECT_EQ(ring.bytes_used(), 1000u);
  ring.Release(1);
  EXPECT_EQ(ring.Largest().bytes, 1000u);
  EXPECT_EQ(ring.bytes_used(), 0u);
}

TEST(StagingRingTest, ReleaseFreesNoLaterStep) {
  StagingRing ring(300);
  ring.Take(5, 100);
  ring.Take(7, 100);
  ring.Take(9, 100);
  ring.Release(4);
  EXPECT_EQ(ring.bytes_used(), 300u);
  ring.Release(8);
  EXPECT_EQ(ring.bytes_used(), 100u);
  EXPECT_EQ(ring.Largest().begin, 0u);
  EXPECT_EQ(ring.Largest().bytes, 200u);
}

TEST(StagingRingTest, StepOfNothingTakesNothing) {
  StagingRing ring(64);
  ring.Take(1, 0);
  EXPECT_EQ(ring.bytes_used(), 0u);
  EXPECT_EQ(ring.Take(2, 64), 0u);
  ring.Take(3, 0);
  EXPECT_EQ(ring.bytes_used(), 64u);
}

// Random steps of random sizes, completed with a random lag: pieces of steps that are not completed
// never overlap, and the largest free piece really is free.
TEST(StagingRingTest, LiveStepsNeverOverlap) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  struct Live {
    uint64_t step, begin, end;
  };
  constexpr uint64_t kBytes = 1 << 16;
  StagingRing ring(kBytes);
  std::deque<Live> live;
  uint64_t wraps = 0;
  uint64_t last_begin = 0;
  for (uint64_t step = 1; step <= 20'000; ++step) {
    if (!live.empty() && random() % 3 != 0) {
      const uint64_t completed = live[random() % live.size()].step;
      ring.Release(completed);
      while (!live.empty() && live.front().step <= completed) live.pop_front();
    }
    const StagingRing::Piece piece = ring.Largest();
    ASSERT_LE(piece.begin + piece.bytes, kBytes);
    const uint64_t bytes = piece.bytes == 0 ? 0 : random() % (piece.bytes / 2 + 1);
    const uint64_t begin = ring.Take(step, bytes);
    if (bytes == 0) continue;
    for (const Live& other : live) {
      ASSERT_TRUE(begin >= other.end || begin + bytes <= other.begin)
          << "step " << step << " lies on step " << other.step;
    }
    live.push_back({step, begin, begin + bytes});
    wraps += begin < last_begin;
    last_begin = begin;
    ASSERT_LE(begin + bytes, ring.high_water());
  }
  EXPECT_GT(wraps, 100u);  // Or the test has not seen what it is for.
}

}  // namespace
}  // namespace wavekv
