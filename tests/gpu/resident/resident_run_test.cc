// Long random runs of an engine and a manager, whose turns come between the phases of a step and in
// the middle of every access to the memory that they share: every step reads the rows that it
// wanted, however late the manager is.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "tests/gpu/resident/region_harness.h"
#include "tests/index/oracle.h"

namespace wavekv::resident {
namespace {

constexpr uint32_t kLayers = 2;
constexpr uint32_t kRingRows = 256;
constexpr uint32_t kSmallSegment = 16;
constexpr size_t kSegmentsMax = 8;  // Then all but the first become one.
constexpr uint32_t kFirstTokens = 1200;
constexpr uint32_t kFirstSegment = 1000;
constexpr uint64_t kMaxTokens = 3000;

struct RunCase {
  const char* name;
  double cache_ratio;
  uint32_t retrieve_count;
  uint32_t steps;
  // Phases of the engine for each turn of the manager.
  uint32_t engine_turns;
  bool log_is_lapped;
  RegionMemory memory;
};
void PrintTo(const RunCase& row, std::ostream* out) { *out << row.name; }

class ResidentRunTest : public ::testing::TestWithParam<RunCase> {
 protected:
  static ResidentOptions Options() {
    ResidentOptions options;
    options.cache_ratio = GetParam().cache_ratio;
    options.ring_rows = kRingRows;
    return options;
  }

  void LoadAll() {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto view = tokens_.View(layer, GetParam().retrieve_count);
      const absl::Status status = manager().Load(layer, view);
      ASSERT_TRUE(status.ok()) << status;
      published_[layer] = view.steady_first;
      announced_[layer] = copied_[layer] = tokens_.token_count();
    }
  }

  void TearDown() override { harness_.memory().SetTurn(nullptr, 1); }

  ResidentSequence& manager() { return harness_.manager(); }
  bool OneIn(uint32_t n) { return tokens_.random()() % n == 0; }

  void PollOnce() {
    const auto appended = manager().Poll();
    ASSERT_TRUE(appended.ok()) << appended.status();
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      ASSERT_GE((*appended)[layer], announced_[layer]);
      ASSERT_LE((*appended)[layer], tokens_.token_count());
      announced_[layer] = (*appended)[layer];
    }
  }

  // Copies appended rows out, as the daemon does before it builds.
  void CopyOut(uint32_t layer) {
    const auto count = static_cast<uint32_t>(announced_[layer] - copied_[layer]);
    const size_t bytes = tokens_.shape().kv_head_count * tokens_.shape().key_bytes();
    std::vector<std::byte> keys(count * bytes), values(count * bytes);
    const absl::Status status =
        manager().ReadRows(layer, copied_[layer], count, keys.data(), values.data());
    ASSERT_TRUE(status.ok()) << status;
    for (uint32_t i = 0; i < count; ++i) {
      const auto key = tokens_.KeysAt(layer, copied_[layer] + i);
      const auto value = tokens_.ValuesAt(layer, copied_[layer] + i);
      ASSERT_TRUE(std::equal(key.begin(), key.end(), &keys[i * bytes]));
      ASSERT_TRUE(std::equal(value.begin(), value.end(), &values[i * bytes]));
    }
    copied_[layer] = announced_[layer];
  }

  // Makes a segment of what was copied out; many small ones become one.
  void Build(uint32_t layer) {
    if (copied_[layer] - tokens_.steady_first(layer) < kSmallSegment + 8) return;
    tokens_.Cluster(layer, kSmallSegment);
    if (tokens_.segment_count(layer) < kSegmentsMax) return;
    tokens_.Merge(layer, TestSequence::kSinks + kFirstSegment);
  }

  void PublishIfNew(uint32_t layer) {
    if (tokens_.steady_first(layer) == published_[layer]) return;
    const auto view = tokens_.View(layer, GetParam().retrieve_count);
    const auto done = manager().Publish(layer, view);
    // Numbers of what left are not free while claims may have been lost.
    if (GetParam().log_is_lapped && absl::IsResourceExhausted(done.status())) return;
    ASSERT_TRUE(done.ok()) << done.status();
    if (!*done) return;
    published_[layer] = view.steady_first;
    ++publications_;
  }

  void ManagersTurn() {
    const uint32_t layer = static_cast<uint32_t>(tokens_.random()() % kLayers);
    for (uint64_t round = tokens_.random()() % 3; round < 3; ++round) {
      ASSERT_NO_FATAL_FAILURE(PollOnce());
      ASSERT_NO_FATAL_FAILURE(CopyOut(layer));
      Build(layer);
      ASSERT_NO_FATAL_FAILURE(PublishIfNew(layer));
    }
  }

  // Drains, forgets some tokens, and loads everything anew.
  void Truncate() {
    while (phase_ != Phase::kIdle || layer_ != 0) EngineTurn();
    harness_.memory().SetTurn(nullptr, 1);
    tokens_.Truncate(
        std::max<uint64_t>(tokens_.token_count() - tokens_.random()() % 100, kFirstTokens - 100));
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      // A segment that was cut is exact again, until it is built anew.
      const uint64_t exact = tokens_.token_count() - tokens_.steady_first(layer);
      if (exact > kRingRows - 32) tokens_.Cluster(layer, static_cast<uint32_t>(exact) - 64);
    }
    ASSERT_NO_FATAL_FAILURE(LoadAll());
    LetEngineInterfere();
  }

  // The next phase of a step over one layer; layers follow one another, then comes a new token.
  void EngineTurn() {
    switch (phase_) {
      case Phase::kIdle:
        BeginStep();
        return;
      case Phase::kBegun:
        queries_ = tokens_.Queries();
        engine_.Rank(queries_);
        phase_ = Phase::kRanked;
        return;
      case Phase::kRanked:
        engine_.Claim();
        phase_ = Phase::kClaimed;
        return;
      case Phase::kClaimed:
        EndStep();
        return;
    }
  }

  void BeginStep() {
    if (layer_ == 0) {
      appends_ = HasRoom() && tokens_.token_count() + 1 < kMaxTokens;
      if (appends_) tokens_.Append(1);
    }
    std::vector<std::byte> key, value;
    if (appends_) {
      key = tokens_.KeysAt(layer_, tokens_.token_count() - 1);
      value = tokens_.ValuesAt(layer_, tokens_.token_count() - 1);
    }
    engine_.Begin(layer_, key, value);
    phase_ = Phase::kBegun;
  }

  void EndStep() {
    const StepResult result = engine_.Attend();
    EXPECT_EQ(tokens_.Check(layer_, harness_.region(), queries_, result), "") << "step " << steps_;
    EXPECT_EQ(result.heads[0].appended, tokens_.token_count());
    for (const StepHead& head : result.heads) {
      EXPECT_FALSE(head.overflowed);
      hits_ += head.hits();
      blocks_ += head.blocks.size();
    }
    phase_ = Phase::kIdle;
    layer_ = (layer_ + 1) % kLayers;
    ++steps_;
  }

  void LetEngineInterfere() {
    harness_.memory().SetTurn([this] { EngineTurn(); }, 150);
  }

  // Whether the ring has room for one more token, as the SDK asks before it submits a step.
  bool HasRoom() const {
    const uint64_t oldest = *std::min_element(published_.begin(), published_.end());
    return tokens_.token_count() < oldest / 8 * 8 + kRingRows;
  }

  enum class Phase : uint8_t { kIdle, kBegun, kRanked, kClaimed };

  TestSequence tokens_{SmallShape(64, DType::kBF16, kLayers), 7, 256 << 20};
  RegionHarness harness_{tokens_.shape(), kMaxTokens, Options(), GetParam().memory};
  ReferenceStep engine_ = harness_.Engine(tokens_);
  std::vector<uint64_t> published_ = std::vector<uint64_t>(kLayers);  // steady_first
  std::vector<uint64_t> announced_ = std::vector<uint64_t>(kLayers);  // Tokens in place.
  std::vector<uint64_t> copied_ = std::vector<uint64_t>(kLayers);     // Likewise, copied out.
  uint64_t publications_ = 0, hits_ = 0, blocks_ = 0, steps_ = 0;
  // The step under way.
  Phase phase_ = Phase::kIdle;
  uint32_t layer_ = 0;
  bool appends_ = false;
  std::vector<float> queries_;
};

TEST_P(ResidentRunTest, EveryStepReadsWhatItWanted) {
  tokens_.Append(kFirstTokens);
  for (uint32_t layer = 0; layer < kLayers; ++layer) tokens_.Cluster(layer, kFirstSegment);
  LoadAll();
  LetEngineInterfere();
  while (steps_ < GetParam().steps && !HasFailure()) {
    for (uint32_t turn = 0; turn < GetParam().engine_turns; ++turn) EngineTurn();
    ASSERT_NO_FATAL_FAILURE(ManagersTurn());
    if (OneIn(400 / GetParam().engine_turns + 4)) {
      ASSERT_NO_FATAL_FAILURE(Truncate());
    }
  }
  while (phase_ != Phase::kIdle) EngineTurn();
  harness_.memory().SetTurn(nullptr, 1);
  ASSERT_NO_FATAL_FAILURE(PollOnce());
  const ResidentCounters counters = manager().counters();
  EXPECT_EQ(counters.violations, 0u);
  EXPECT_EQ(counters.overflows, 0u);
  EXPECT_EQ(counters.hit_blocks, hits_);
  EXPECT_EQ(counters.hit_blocks + counters.miss_blocks, blocks_);
  EXPECT_GT(hits_, blocks_ / 50);
  EXPECT_GT(publications_, 1u);
  EXPECT_EQ(counters.log_losses > 0, GetParam().log_is_lapped);
}

INSTANTIATE_TEST_SUITE_P(
    All, ResidentRunTest,
    ::testing::Values(
        // The manager is there in every phase.
        RunCase{"Prompt", 0.2, 10, 1000, 1, false, RegionMemory::kHost},
        RunCase{"OnADevice", 0.2, 10, 500, 2, false, RegionMemory::kFakeDevice},
        // A few slots: blocks come and go all the time.
        RunCase{"TinyCache", 0.02, 14, 1000, 2, false, RegionMemory::kHost},
        RunCase{"LateManager", 0.1, 14, 1000, 30, false, RegionMemory::kHost},
        // The log is lapped again and again, with slots in doubt most of the time.
        RunCase{"LappedLog", 0.1, 60, 800, 600, true, RegionMemory::kHost},
        RunCase{"LappedLogTinyCache", 0.02, 60, 800, 600, true, RegionMemory::kHost}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace wavekv::resident
