// An engine that writes rubbish into whatever it can write, and one that runs beside the manager in
// a thread of its own.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "tests/gpu/resident/region_harness.h"
#include "tests/index/oracle.h"

namespace wavekv::resident {
namespace {

ResidentOptions SmallOptions() {
  ResidentOptions options;
  options.cache_ratio = 0.1;
  options.ring_rows = 256;
  return options;
}

// Layer 0 belongs to an engine that lies, layer 1 to an honest one, and beside the region lies
// somebody else's memory.
class HostileEngineTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kTokens = 900;

  HostileEngineTest() {
    tokens_.Append(kTokens);
    for (uint32_t layer = 0; layer < 2; ++layer) tokens_.Cluster(layer, 800);
    Load(0);
    Load(1);
  }
  void Load(uint32_t layer) {
    const absl::Status status = harness_.manager().Load(layer, tokens_.View(layer, 12));
    ASSERT_TRUE(status.ok()) << status;
  }

  uint64_t Word() {
    switch (random_() % 6) {
      case 0:
        return random_();
      case 1:
        return random_() % 64;
      case 2:
        return ~uint64_t{0} - random_() % 64;
      case 3:
        return uint64_t{1} << random_() % 64;
      default:
        return random_() % 5000;
    }
  }
  template <class T>
  void Spoil(std::byte* array, uint64_t count) {
    auto* const words = reinterpret_cast<T*>(array);
    std::atomic_ref<T>(words[random_() % count]).store(static_cast<T>(Word()));
  }
  // One word of layer 0 that an engine writes.
  void SpoilSomething() {
    const uint32_t number = static_cast<uint32_t>(random_() % 2);
    const UnitLayout& layout = harness_.header().unit;
    std::byte* const unit = harness_.unit(number);
    switch (random_() % 5) {
      case 0:
      case 1:
        // The manager's words are spoilt, too, but for `published`: that is where the index is.
        Spoil<uint64_t>(reinterpret_cast<std::byte*>(&harness_.states()[number]),
                        offsetof(gpu::HeadState, published) / sizeof(uint64_t));
        break;
      case 2:
        Spoil<uint64_t>(unit + layout.log_offset, layout.log_capacity * 2);
        break;
      case 3:
        Spoil<int32_t>(unit + layout.block_slots_offset, layout.block_capacity);
        break;
      case 4:
        Spoil<uint32_t>(unit + layout.free_slots_offset, 2 * layout.slot_count);
        break;
    }
  }

  TestSequence tokens_{SmallShape(), 21};
  RegionHarness harness_{tokens_.shape(), 2048, SmallOptions()};
  ReferenceStep liar_ = harness_.Engine(tokens_);
  ReferenceStep engine_ = harness_.Engine(tokens_);
  std::mt19937_64 random_ = test::NewRandom(22);
};

TEST_F(HostileEngineTest, OnlyItsOwnUnitsSuffer) {
  const RegionPlace beside = harness_.buffer().Carve(RegionHarness::kSpareBytes / 2).value();
  std::vector<std::byte> theirs(beside.bytes, std::byte{0x3c});
  const ByteCopy copy{theirs.data(), beside.offset, theirs.size()};
  ASSERT_TRUE(harness_.buffer().memory().Write({&copy, 1}).ok());

  std::vector<std::byte> rows(64 << 10);
  for (int round = 0; round < 500; ++round) {
    for (uint64_t i = random_() % 4; i > 0; --i) SpoilSomething();
    // It takes steps, too, that stumble over what it wrote.
    if (random_() % 4 == 0)
      (void)liar_.Run(0, tokens_.Queries(), tokens_.KeysAt(0, 7), tokens_.ValuesAt(0, 7));
    const std::vector<float> queries = tokens_.Queries();
    ASSERT_EQ(tokens_.Check(1, harness_.region(), queries, engine_.Run(1, queries)), "");
    const auto appended = harness_.manager().Poll();
    ASSERT_TRUE(appended.ok()) << appended.status();
    const uint64_t first = tokens_.steady_first(0);
    ASSERT_GE((*appended)[0], kTokens);
    ASSERT_LE((*appended)[0], RingEnd(harness_.header().unit, first));
    ASSERT_EQ((*appended)[1], kTokens);
    if (random_() % 50 == 0) (void)harness_.manager().Publish(0, tokens_.View(0, 12));
    if (random_() % 50 == 0) {
      (void)harness_.manager().ReadRows(0, first, 20, rows.data(), rows.data());
    }
  }
  EXPECT_GT(harness_.manager().counters().violations, 100u);
  std::vector<std::byte> found(beside.bytes);
  const ByteRead piece{beside.offset, found.data(), found.size()};
  ASSERT_TRUE(harness_.memory().Read({&piece, 1}).ok());
  EXPECT_EQ(found, theirs);
}

// Whatever was written there, a drained layer is as good as new after it was loaded.
TEST_F(HostileEngineTest, LoadingHeals) {
  for (int round = 0; round < 30; ++round) {
    for (int i = 0; i < 40; ++i) SpoilSomething();
    ASSERT_TRUE(harness_.manager().Poll().ok());
    for (uint32_t unit = 0; unit < 2; ++unit) {
      gpu::HeadState& state = harness_.states()[unit];
      state.started = state.completed_epoch = Word() / 2;
    }
    Load(0);
    const std::vector<float> queries = tokens_.Queries();
    for (int step = 0; step < 4; ++step) {
      const StepResult result = liar_.Run(0, queries);
      ASSERT_EQ(tokens_.Check(0, harness_.region(), queries, result), "");
      ASSERT_TRUE(harness_.manager().Poll().ok());
      if (step > 0) {
        EXPECT_GT(result.heads[0].hits() + result.heads[1].hits(), 0u);
      }
    }
  }
}

// An engine and a manager in threads of their own, with nothing between them but the region.
class ThreadsTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kLoaded = 500, kSegment = 24, kAppended = 220;

  // Views of ever larger indexes, and where their exact tokens begin.
  struct Version {
    ResidentLayer view;
    uint64_t steady_first = 0;
  };

  ThreadsTest() {
    tokens_.Append(kLoaded + kAppended);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      tokens_.Cluster(layer, 400);
      const absl::Status status = harness_.manager().Load(layer, tokens_.View(layer, 12, kLoaded));
      EXPECT_TRUE(status.ok()) << status;
      steady_first_[layer] = tokens_.steady_first(layer);
      while (tokens_.steady_first(layer) + kSegment <= tokens_.token_count()) {
        tokens_.Cluster(layer, kSegment);
        if (tokens_.segment_count(layer) > 6) tokens_.Merge(layer, 404);
        const uint64_t first = tokens_.steady_first(layer);
        versions_[layer].push_back({tokens_.View(layer, 12, first), first});
      }
    }
    for (int i = 0; i < 40; ++i) queries_.push_back(tokens_.Queries());
  }

  // Steps that append, as the ring allows.
  void RunEngine() {
    ReferenceStep engine = harness_.Engine(tokens_);
    for (uint64_t position = kLoaded; position < tokens_.token_count(); ++position) {
      for (uint32_t layer = 0; layer < 2; ++layer) {
        while (position >= RingEnd(harness_.header().unit, steady_first_[layer].load())) {
          if (Late()) return;
          std::this_thread::yield();
        }
        const std::vector<float>& queries = queries_[position % queries_.size()];
        const StepResult result = engine.Run(layer, queries, tokens_.KeysAt(layer, position),
                                             tokens_.ValuesAt(layer, position));
        const std::string wrong = tokens_.Check(layer, harness_.region(), queries, result);
        EXPECT_EQ(wrong, "") << "token " << position;
        if (!wrong.empty()) return;
      }
    }
    appended_all_ = true;
  }

  void RunManager() {
    while (!stopped_.load()) {
      const auto appended = harness_.manager().Poll();
      ASSERT_TRUE(appended.ok()) << appended.status();
      for (uint32_t layer = 0; layer < 2; ++layer) {
        if (versions_[layer].empty()) continue;
        const Version& next = versions_[layer].front();
        if (next.steady_first > (*appended)[layer]) continue;
        const auto done = harness_.manager().Publish(layer, next.view);
        if (absl::IsResourceExhausted(done.status())) continue;  // While claims may be lost.
        ASSERT_TRUE(done.ok()) << done.status();
        if (!*done) continue;
        steady_first_[layer] = next.steady_first;
        versions_[layer].pop_front();
      }
    }
  }

  bool Late() const { return std::chrono::steady_clock::now() > deadline_; }

  TestSequence tokens_{SmallShape(), 31};
  RegionHarness harness_{tokens_.shape(), 2048, SmallOptions()};
  std::deque<Version> versions_[2];
  std::vector<std::vector<float>> queries_;
  std::atomic<uint64_t> steady_first_[2] = {0, 0};
  std::atomic<bool> stopped_{false};
  bool appended_all_ = false;
  const std::chrono::steady_clock::time_point deadline_ =
      std::chrono::steady_clock::now() + std::chrono::seconds(100);
};

TEST_F(ThreadsTest, AnEngineStepsWhileTheManagerPublishes) {
  std::thread manager([this] { RunManager(); });
  RunEngine();
  stopped_ = true;
  manager.join();
  EXPECT_TRUE(appended_all_) << "the ring got no room before the deadline";
  ASSERT_TRUE(harness_.manager().Poll().ok());
  const ResidentCounters counters = harness_.manager().counters();
  EXPECT_EQ(counters.violations, 0u);
  EXPECT_EQ(counters.overflows, 0u);
  EXPECT_GT(counters.hit_blocks, 0u);
}

}  // namespace
}  // namespace wavekv::resident
