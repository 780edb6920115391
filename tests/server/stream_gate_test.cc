// A stream is finished once, whoever wants it to end.

#include "daemon/server/stream_gate.h"

#include <atomic>
#include <thread>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

TEST(StreamGateTest, AStopFinishesAWaitingStreamAtOnce) {
  StreamGate gate;
  bool waits = false;
  EXPECT_TRUE(gate.EndWork([&] { waits = true; }));
  EXPECT_TRUE(waits);
  EXPECT_TRUE(gate.Stop());
  EXPECT_FALSE(gate.BeginWork()) << "a message that came too late";
  EXPECT_FALSE(gate.FinishWaiting());
  EXPECT_FALSE(gate.Stop());
}

TEST(StreamGateTest, AStopDuringWorkIsLeftToTheWorker) {
  StreamGate gate;
  gate.EndWork([] {});
  EXPECT_TRUE(gate.BeginWork());
  EXPECT_FALSE(gate.Stop());
  bool waits = false;
  EXPECT_FALSE(gate.EndWork([&] { waits = true; }));
  EXPECT_FALSE(waits) << "no further message may be asked for";
}

TEST(StreamGateTest, AnErrorFinishesOnceEvenWhileStopping) {
  StreamGate gate;
  EXPECT_FALSE(gate.Stop());
  gate.FinishWork();
  EXPECT_FALSE(gate.Stop());
  EXPECT_FALSE(gate.FinishWaiting());
}

// The race that matters: the client ends the stream while a shutdown ends it.
TEST(StreamGateTest, ExactlyOneOfManyFinishes) {
  for (int round = 0; round < 2000; ++round) {
    StreamGate gate;
    std::atomic<int> finished = 0;
    gate.EndWork([] {});
    std::thread stopper([&] { finished += gate.Stop() ? 1 : 0; });
    if (round % 2 == 0) {
      finished += gate.FinishWaiting() ? 1 : 0;
    } else if (gate.BeginWork()) {
      finished += gate.EndWork([] {}) ? 0 : 1;
    }
    stopper.join();
    finished += gate.Stop() ? 1 : 0;
    EXPECT_EQ(finished.load(), 1);
  }
}

class FakeStream : public StoppableStream {
 public:
  void Stop() override { ++stops; }
  int stops = 0;
};

TEST(StreamSetTest, StopsWhatIsOpenAndRefusesWhatComesLater) {
  StreamSet set;
  FakeStream open;
  FakeStream closed;
  FakeStream late;
  EXPECT_TRUE(set.Add(&open));
  EXPECT_TRUE(set.Add(&closed));
  set.Remove(&closed);
  set.StopAll();
  EXPECT_FALSE(set.Add(&late));
  EXPECT_EQ(open.stops, 1);
  EXPECT_EQ(closed.stops, 0);
  EXPECT_EQ(late.stops, 0);
}

}  // namespace
}  // namespace wavekv
