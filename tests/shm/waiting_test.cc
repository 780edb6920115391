#include "proto/shm/waiting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace wavekv::shm {
namespace {

using std::chrono::steady_clock;
using ::testing::ElementsAre;

TEST(SpinSlotsTest, OneCpuIsLeftToTheOthers) {
  SpinSlots one(1);
  EXPECT_FALSE(one.TryTake()) << "on a single CPU nobody spins";
  SpinSlots three(3);
  EXPECT_TRUE(three.TryTake());
  EXPECT_TRUE(three.TryTake());
  EXPECT_FALSE(three.TryTake());
  three.Return();
  EXPECT_TRUE(three.TryTake());
}

TEST(AdaptiveSpinTest, SpinsWhereWaitsAreShort) {
  SpinSlots slots(2);
  AdaptiveSpin spin(&slots);
  int looks = 0;
  EXPECT_TRUE(spin.Spin([&looks] { return ++looks > 10; }));
  EXPECT_EQ(looks, 11);
  EXPECT_TRUE(slots.TryTake()) << "the slot was not given back";
}

// Which of `waits` waits for something that never comes are spun at, counted from 0.
std::vector<uint32_t> VainSpins(uint32_t waits, AdaptiveSpin* spin) {
  std::vector<uint32_t> spun;
  for (uint32_t i = 0; i < waits; ++i) {
    int looks = 0;
    EXPECT_FALSE(spin->Spin([&looks] {
      ++looks;
      return false;
    }));
    if (looks > 1) spun.push_back(i);
  }
  return spun;
}

TEST(AdaptiveSpinTest, SpinsInVainMoreAndMoreSeldom) {
  SpinSlots slots(2);
  AdaptiveSpin spin(&slots);
  EXPECT_THAT(VainSpins(250, &spin), ElementsAre(0, 1, 3, 7, 15, 31, 63, 127, 191));
}

// One that finds its answer: as if there had been no others.
TEST(AdaptiveSpinTest, SpinsAgainOnceItHasPaid) {
  SpinSlots slots(2);
  AdaptiveSpin spin(&slots);
  VainSpins(250, &spin);
  const auto finds = [&spin] {
    int looks = 0;
    return spin.Spin([&looks] { return ++looks > 3; });
  };
  uint32_t waits = 1;
  while (!finds()) ++waits;
  EXPECT_LE(waits, AdaptiveSpin::kWaitsSkippedMax + 1);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(finds());
  EXPECT_THAT(VainSpins(10, &spin), ElementsAre(0, 1, 3, 7));
}

TEST(AdaptiveSpinTest, DoesNotSpinWithoutASlot) {
  SpinSlots slots(1);
  AdaptiveSpin spin(&slots);
  int looks = 0;
  EXPECT_FALSE(spin.Spin([&looks] {
    ++looks;
    return false;
  }));
  EXPECT_EQ(looks, 1);
}

TEST(FutexTest, ReturnsAtOnceWhenTheWordDiffers) {
  uint32_t word = 5;
  FutexWait(&word, 6, std::chrono::hours(1));
}

TEST(FutexTest, IsWoken) {
  uint32_t word = 0;
  std::thread waker([&word] {
    std::atomic_ref<uint32_t>(word).store(1);
    FutexWake(&word);
  });
  while (std::atomic_ref<uint32_t>(word).load() == 0) FutexWait(&word, 0, std::chrono::hours(1));
  waker.join();
}

TEST(MonotonicTest, DeadlinesComeBack) {
  const TimePoint now = steady_clock::now();
  EXPECT_EQ(FromMonotonicNs(ToMonotonicNs(now)), now);
  EXPECT_EQ(ToMonotonicNs(TimePoint(std::chrono::nanoseconds(-5))), 0u);
  EXPECT_GT(FromMonotonicNs(UINT64_MAX), now) << "whatever a client writes is a time";
}

}  // namespace
}  // namespace wavekv::shm
