// completed_step never names a step that somebody may still read.
#include "client/step_ledger.h"

#include <gtest/gtest.h>

namespace wavekv::client {
namespace {

TEST(StepLedgerTest, AcknowledgesWhatIsRead) {
  StepLedger ledger;
  for (uint64_t step = 1; step <= 3; ++step) {
    const StepLedger::Ticket ticket = ledger.Begin();
    EXPECT_EQ(ticket.completed_step, step - 1);
    ledger.Staged(ticket, step);
    ledger.Finish(ticket);
  }
}

TEST(StepLedgerTest, AReaderHoldsItsStepAndLaterOnes) {
  StepLedger ledger;
  const auto first = ledger.Begin();
  ledger.Staged(first, 1);
  const auto second = ledger.Begin();
  EXPECT_EQ(second.completed_step, 0u) << "step 1 is being read";
  ledger.Staged(second, 2);
  ledger.Finish(second);
  const auto third = ledger.Begin();
  EXPECT_EQ(third.completed_step, 0u) << "step 1 is still being read";
  ledger.Finish(first);
  ledger.Finish(third);
  EXPECT_EQ(ledger.Begin().completed_step, 2u);
}

TEST(StepLedgerTest, AQueryUnderWayMayGetAnyLaterStep) {
  StepLedger ledger;
  const auto slow = ledger.Begin();  // Its reply, of step 1, is not here yet.
  const auto fast = ledger.Begin();
  ledger.Staged(fast, 2);
  ledger.Finish(fast);
  const auto next = ledger.Begin();
  EXPECT_EQ(next.completed_step, 0u) << "the rows of step 1 are about to be read";
  ledger.Staged(slow, 1);
  EXPECT_EQ(ledger.Begin().completed_step, 0u);
}

TEST(StepLedgerTest, AFailedQueryHoldsNothing) {
  StepLedger ledger;
  const auto read = ledger.Begin();
  ledger.Staged(read, 5);
  ledger.Finish(read);
  const auto failed = ledger.Begin();
  ledger.Finish(failed);
  EXPECT_EQ(ledger.Begin().completed_step, 5u);
}

}  // namespace
}  // namespace wavekv::client
