#include "storage/best_fit_allocator.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

constexpr uint64_t kUnit = BestFitAllocator::kGranularityBytes;

TEST(BestFitAllocatorTest, RoundsUpAndNoticesOverflow) {
  EXPECT_EQ(BestFitAllocator::RoundUp(0), 0u);
  EXPECT_EQ(BestFitAllocator::RoundUp(1), kUnit);
  EXPECT_EQ(BestFitAllocator::RoundUp(kUnit), kUnit);
  EXPECT_EQ(BestFitAllocator::RoundUp(kUnit + 1), 2 * kUnit);
  EXPECT_EQ(BestFitAllocator::RoundUp(~uint64_t{0}), std::nullopt);
  EXPECT_EQ(BestFitAllocator::RoundUp(~uint64_t{0} - kUnit + 1), ~uint64_t{0} - kUnit + 1);
}

TEST(BestFitAllocatorTest, TakesTheTightestPieceThenTheLowestOffset) {
  BestFitAllocator allocator(100 * kUnit);
  // Holes of 4, 2, 3 and 2 units with walls of one unit between, then the open end.
  std::vector<std::pair<uint64_t, uint64_t>> holes;
  for (const uint64_t units : {4, 2, 3, 2}) {
    holes.emplace_back(*allocator.Allocate(units * kUnit), units * kUnit);
    ASSERT_TRUE(allocator.Allocate(kUnit).has_value());
  }
  for (const auto& [offset, bytes] : holes) allocator.Free(offset, bytes);
  EXPECT_EQ(allocator.piece_count(), 5u);
  EXPECT_EQ(allocator.Allocate(2 * kUnit), holes[1].first) << "the first of two equal holes";
  EXPECT_EQ(allocator.Allocate(2 * kUnit), holes[3].first);
  EXPECT_EQ(allocator.Allocate(2 * kUnit), holes[2].first) << "3 units before 4 and the end";
  EXPECT_EQ(allocator.Allocate(kUnit), holes[2].first + 2 * kUnit);
  EXPECT_EQ(allocator.Allocate(5 * kUnit), 15 * kUnit) << "no hole fits";
}

TEST(BestFitAllocatorTest, FullAndEmptyRanges) {
  EXPECT_EQ(BestFitAllocator(0).Allocate(kUnit), std::nullopt);
  EXPECT_EQ(BestFitAllocator(kUnit - 1).Allocate(kUnit), std::nullopt);
  BestFitAllocator allocator(2 * kUnit + 1);
  EXPECT_EQ(allocator.free_bytes(), 2 * kUnit);
  EXPECT_EQ(allocator.Allocate(3 * kUnit), std::nullopt);
  EXPECT_EQ(allocator.Allocate(2 * kUnit), 0u);
  EXPECT_EQ(allocator.largest_free_bytes(), 0u);
  EXPECT_EQ(allocator.Allocate(kUnit), std::nullopt);
}

TEST(BestFitAllocatorTest, RandomTrafficAgreesWithAModel) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  constexpr uint64_t kUnits = 300;
  BestFitAllocator allocator(kUnits * kUnit);
  std::vector<bool> used(kUnits, false);
  std::map<uint64_t, uint64_t> live;  // offset -> bytes
  for (int step = 0; step < 20000; ++step) {
    if (rng() % 100 < 55) {
      const uint64_t bytes = (1 + rng() % (rng() % 8 == 0 ? 60 : 6)) * kUnit;
      const auto offset = allocator.Allocate(bytes);
      // The model: the shortest free stretch that is long enough, the lowest of equals.
      uint64_t best_offset = 0, best_units = 0;
      for (uint64_t begin = 0; begin < kUnits;) {
        uint64_t end = begin;
        while (end < kUnits && !used[end]) ++end;
        const uint64_t units = end - begin;
        if (units * kUnit >= bytes && (best_units == 0 || units < best_units)) {
          best_units = units;
          best_offset = begin * kUnit;
        }
        begin = end + 1;
      }
      ASSERT_EQ(offset.has_value(), best_units > 0) << "step " << step;
      if (!offset.has_value()) continue;
      ASSERT_EQ(*offset, best_offset) << "step " << step;
      for (uint64_t u = *offset / kUnit; u < (*offset + bytes) / kUnit; ++u) {
        ASSERT_FALSE(used[u]) << "overlap at unit " << u;
        used[u] = true;
      }
      live.emplace(*offset, bytes);
    } else if (!live.empty()) {
      const auto victim = std::next(live.begin(), static_cast<ptrdiff_t>(rng() % live.size()));
      allocator.Free(victim->first, victim->second);
      std::fill_n(used.begin() + static_cast<ptrdiff_t>(victim->first / kUnit),
                  victim->second / kUnit, false);
      live.erase(victim);
    }
    ASSERT_EQ(allocator.free_bytes(),
              static_cast<uint64_t>(std::count(used.begin(), used.end(), false)) * kUnit);
  }
  for (const auto& [offset, bytes] : live) allocator.Free(offset, bytes);
  EXPECT_EQ(allocator.piece_count(), 1u) << "everything joins again";
  EXPECT_EQ(allocator.largest_free_bytes(), kUnits * kUnit);
}

TEST(BestFitAllocatorDeathTest, FreeingTwiceAborts) {
  BestFitAllocator allocator(10 * kUnit);
  const uint64_t offset = *allocator.Allocate(4 * kUnit);
  ASSERT_TRUE(allocator.Allocate(kUnit).has_value());
  allocator.Free(offset, 4 * kUnit);
  EXPECT_DEATH(allocator.Free(offset, 4 * kUnit), "free already");
  EXPECT_DEATH(allocator.Free(offset + kUnit, kUnit), "free already");
  EXPECT_DEATH(allocator.Free(10 * kUnit, kUnit), "out of range");
}

}  // namespace
}  // namespace wavekv
