// A shutdown waits for running calls, no longer than it may.

#include "daemon/server/call_tracker.h"

#include <memory>
#include <thread>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

TEST(CallTrackerTest, WaitsForTheLastCall) {
  CallTracker tracker;
  EXPECT_TRUE(tracker.WaitIdle(std::chrono::milliseconds(0)));
  auto first = std::make_unique<CallTracker::Token>(&tracker);
  auto second = std::make_unique<CallTracker::Token>(&tracker);
  EXPECT_EQ(tracker.running_count(), 2u);
  EXPECT_FALSE(tracker.WaitIdle(std::chrono::milliseconds(1)));
  first.reset();
  EXPECT_FALSE(tracker.WaitIdle(std::chrono::milliseconds(1)));
  std::thread ender([&] { second.reset(); });
  EXPECT_TRUE(tracker.WaitIdle(std::chrono::minutes(1)));
  ender.join();
  EXPECT_EQ(tracker.running_count(), 0u);
}

}  // namespace
}  // namespace wavekv
