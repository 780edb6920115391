#include "daemon/engine/build_queue.h"

#include "gtest/gtest.h"

namespace wavekv {
namespace {

TEST(BuildQueueTest, OneAtATimeInOrder) {
  BuildQueue queue;
  EXPECT_TRUE(queue.idle());
  queue.Push({4, 260});
  queue.Push({260, 516});
  const std::shared_ptr<BuildJob> first = queue.Start();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->range, (TokenRange{4, 260}));
  EXPECT_EQ(queue.Start(), nullptr) << "one runs";
  EXPECT_FALSE(queue.DoneUpTo(first->ticket));
  EXPECT_EQ(queue.PendingTokens(queue.last_ticket()), 512u);
  queue.Finish(false);
  EXPECT_TRUE(queue.DoneUpTo(first->ticket));
  EXPECT_FALSE(queue.DoneUpTo(queue.last_ticket()));
  EXPECT_EQ(queue.Start()->range, (TokenRange{260, 516}));
  queue.Finish(false);
  EXPECT_TRUE(queue.idle());
  EXPECT_TRUE(queue.DoneUpTo(queue.last_ticket()));
}

TEST(BuildQueueTest, CoveringJobReplacesWaitingOnes) {
  BuildQueue queue;
  queue.Push({4, 260});
  ASSERT_NE(queue.Start(), nullptr);
  queue.Push({260, 516});
  queue.Push({516, 772});
  queue.Push({4, 1024});
  EXPECT_EQ(queue.Planned({}), (PlannedRanges{{4, 1024}}));
  queue.Finish(/*again=*/true);  // Failed, and covered by what waits: not again.
  EXPECT_EQ(queue.Start()->range, (TokenRange{4, 1024}));
}

TEST(BuildQueueTest, FailedJobComesAgain) {
  BuildQueue queue;
  queue.Push({4, 260});
  queue.Push({260, 516});
  ASSERT_NE(queue.Start(), nullptr);
  queue.Finish(/*again=*/true);
  EXPECT_EQ(queue.Start()->range, (TokenRange{4, 260}));
}

TEST(BuildQueueTest, TruncationCancelsWhatItTouches) {
  BuildQueue queue;
  queue.Push({4, 1024});
  const std::shared_ptr<BuildJob> running = queue.Start();
  queue.Push({1024, 2048});
  queue.Truncate(1024 + 64);
  EXPECT_FALSE(running->cancelled) << "its tokens stay outside the local window";
  EXPECT_EQ(queue.Planned({}), (PlannedRanges{{4, 1024}}));
  queue.Truncate(1024 + 63);
  EXPECT_TRUE(running->cancelled);
  EXPECT_EQ(queue.Planned({}), PlannedRanges());
  EXPECT_FALSE(queue.idle()) << "it has not ended yet";
  queue.Finish(/*again=*/true);
  EXPECT_TRUE(queue.idle()) << "cancelled jobs do not come again";
}

}  // namespace
}  // namespace wavekv
