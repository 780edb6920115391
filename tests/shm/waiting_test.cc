#include "proto/shm/waiting.h"

#include <gtest/gtest.h>

#include <thread>

namespace wavekv::shm {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

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

TEST(AdaptiveSpinTest, DoesNotSpinWhereWaitsAreLongUntilTheyAreShortAgain) {
  SpinSlots slots(2);
  AdaptiveSpin spin(&slots);
  const auto looks_of_a_spin = [&spin] {
    int looks = 0;
    EXPECT_FALSE(spin.Spin([&looks] {
      ++looks;
      return false;
    }));
    return looks;
  };
  EXPECT_GT(looks_of_a_spin(), 1);
  for (int i = 0; i < 3; ++i) spin.Learn(milliseconds(100));
  EXPECT_EQ(looks_of_a_spin(), 1) << "one look, and no spin";
  for (int i = 0; i < 8; ++i) spin.Learn(microseconds(5));
  EXPECT_GT(looks_of_a_spin(), 1) << "a hundred milliseconds ago is long ago";
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
