#include "storage/base/clock.h"

#include "gtest/gtest.h"

namespace wavekv {
namespace {

TEST(ClockTest, RealClockNeverGoesBack) {
  int64_t last = RealClock()->NowMs();
  for (int i = 0; i < 1000; ++i) {
    const int64_t now = RealClock()->NowMs();
    ASSERT_GE(now, last);
    last = now;
  }
  EXPECT_GT(WallTimeMs(), 1700000000000) << "after 2023";
}

TEST(ClockTest, FakeClockMovesOnlyWhenTold) {
  FakeClock clock(5);
  const Clock& seen = clock;
  EXPECT_EQ(seen.NowMs(), 5);
  EXPECT_EQ(seen.NowMs(), 5);
  clock.AdvanceMs(37);
  EXPECT_EQ(seen.NowMs(), 42);
}

}  // namespace
}  // namespace wavekv
