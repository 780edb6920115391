// Decode steps come before index building, and building comes on all the same.
#include "daemon/engine/step_priority.h"

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "gtest/gtest.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/gated_backend.h"

namespace wavekv::testing {
namespace {

constexpr std::chrono::hours kForEver(1);
constexpr std::chrono::seconds kWaitMax(60);

// Returns whether `condition` came true; bounded.
template <typename Condition>
bool Eventually(const Condition& condition) {
  const auto deadline = std::chrono::steady_clock::now() + kWaitMax;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

TEST(StepPriorityTest, NobodyWaitsWithoutSteps) {
  StepPriority priority(kForEver);
  priority.LetStepsPass();
  { const StepPriority::Step step(&priority); }
  priority.LetStepsPass();
  EXPECT_EQ(priority.paused_count(), 0u);
}

TEST(StepPriorityTest, PausesUntilTheLastStepEnds) {
  StepPriority priority(kForEver);
  std::optional<StepPriority::Step> first(std::in_place, &priority);
  std::optional<StepPriority::Step> second(std::in_place, &priority);
  std::atomic<bool> steps_ended = false;
  bool ended_when_passed = false;
  std::thread builder([&] {
    priority.LetStepsPass();
    ended_when_passed = steps_ended;
  });
  EXPECT_TRUE(Eventually([&] { return priority.paused_count() == 1; }));
  first.reset();
  EXPECT_EQ(priority.paused_count(), 1u) << "one step still runs";
  steps_ended = true;
  second.reset();
  builder.join();
  EXPECT_TRUE(ended_when_passed);
  EXPECT_EQ(priority.paused_count(), 0u);
}

TEST(StepPriorityTest, APauseHasAnEnd) {
  StepPriority priority(std::chrono::milliseconds(1));
  const StepPriority::Step step(&priority);
  priority.LetStepsPass();
  EXPECT_EQ(priority.paused_count(), 0u);
}

class DecodeFirstTest : public EngineTest {
 protected:
  void Start(uint32_t build_pause_ms_max) {
    EngineOptions options;
    options.epoch = 1;
    options.build_threads = 1;
    options.build_pause_ms_max = build_pause_ms_max;
    options.clock = &clock_;
    StartEngine(options, 64u << 20, nullptr, CreateGatedBackend(gate_));
    gate_->Open();
  }

  // A decode step of `sequence` that stands in the middle until the steps are let go.
  std::thread HeldStep(SequenceRef sequence, uint64_t seed, AttendOutcome* outcome) {
    gate_->HoldSteps(true);
    std::thread step([this, sequence, seed, outcome] {
      *outcome = Attend(sequence, 0, RandomQueries(shape(), seed));
    });
    EXPECT_TRUE(gate_->WaitForHeldStep());
    return step;
  }

  std::shared_ptr<BuildGate> gate_ = std::make_shared<BuildGate>();
};

TEST_F(DecodeFirstTest, AStepThatRunsIsFinishedBeforeBuildingBegins) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1300, seed);
  Start(std::chrono::milliseconds(kForEver).count());
  const SequenceRef decoding = Create(spec_), prefilled = Create(spec_);
  Insert(decoding, data, 0, 100);  // Nothing to cluster.
  AttendOutcome outcome;
  std::thread step = HeldStep(decoding, seed, &outcome);
  Insert(prefilled, data, 0, 1300);
  EXPECT_TRUE(Eventually([this] { return engine_->Stats().builds_paused == 1; }));
  EXPECT_EQ(gate_->calls(), 0u) << "nothing is clustered while the step runs";
  EXPECT_EQ(StatusOf(prefilled).clustered_tokens, 0u);
  gate_->HoldSteps(false);
  step.join();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  WaitIdle(prefilled);
  EXPECT_GT(StatusOf(prefilled).clustered_tokens, 0u);
}

TEST_F(DecodeFirstTest, AStepThatNeverEndsDoesNotStopBuilding) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1300, seed);
  Start(1);
  const SequenceRef decoding = Create(spec_), prefilled = Create(spec_);
  Insert(decoding, data, 0, 100);
  AttendOutcome outcome;
  std::thread step = HeldStep(decoding, seed, &outcome);
  Insert(prefilled, data, 0, 1300);
  WaitIdle(prefilled);
  EXPECT_GT(StatusOf(prefilled).clustered_tokens, 0u);
  gate_->HoldSteps(false);
  step.join();
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
}

}  // namespace
}  // namespace wavekv::testing
