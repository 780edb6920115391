// What the resolve kernel's one thread does, on the host: the descriptor of a sound region says
// what was written, and no region, whatever it holds, gives a pointer outside of it or of a window.
#include "gpu/kernels/resolve_head.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/kernels/head_problem.h"
#include "tests/gpu/kernels/region_writer.h"
#include "tests/shm/seed.h"

namespace wavekv::gpu {
namespace {

constexpr uint32_t kLayers = 2, kKvHeads = 2, kUnits = kLayers * kKvHeads, kDim = 64;
constexpr uint64_t kSequence = 77;

std::vector<HeadProblem> MakeHeads(std::mt19937_64& random) {
  std::vector<HeadProblem> heads;
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    HeadSpec spec;
    spec.segment_tokens = {100 + 40 * unit, 50};
    spec.stale_clusters = unit % 2 * kClusterPad;
    spec.steady_capacity = 64;
    spec.steady = 20 + unit;
    heads.push_back(MakeHead(random, Element::kBF16, kDim, spec));
  }
  return heads;
}

class ResolveHeadTest : public testing::Test {
 protected:
  ResolveHeadTest()
      : random_(shm::FreshSeed()),
        heads_(MakeHeads(random_)),
        image_(random_,
               {.sequence_id = kSequence,
                .layer_count = kLayers,
                .kv_head_count = kKvHeads,
                .slot_count = 4},
               heads_) {
    const resident::UnitLayout& unit = image_.header().unit;
    shape_ = {.layer_count = kLayers,
              .kv_heads = kKvHeads,
              .head_dim = kDim,
              .element = Element::kBF16,
              .cluster_capacity = unit.cluster_capacity,
              .segment_capacity = unit.segment_capacity,
              .retrieve_capacity = heads_[0].spec.retrieve};
    for (const std::vector<uint16_t>& window : image_.windows()) {
      windows_.push_back({reinterpret_cast<const char*>(window.data()), 2 * window.size()});
    }
    entry_ = {.region = reinterpret_cast<char*>(image_.bytes().data()),
              .region_bytes = image_.bytes().size(),
              .windows = windows_.data(),
              .sequence_id = kSequence,
              .window_count = static_cast<uint32_t>(windows_.size())};
  }

  // Whether [data, data + bytes) lies in the region.
  bool InRegion(const void* data, uint64_t bytes) const {
    const auto* at = static_cast<const char*>(data);
    return at >= entry_.region && at <= entry_.region + entry_.region_bytes &&
           bytes <= static_cast<uint64_t>(entry_.region + entry_.region_bytes - at);
  }
  bool InWindow(const void* data, uint64_t bytes) const {
    const auto* at = static_cast<const char*>(data);
    return std::any_of(windows_.begin(), windows_.end(), [&](const ResolveWindow& window) {
      return at >= window.data && at <= window.data + window.bytes &&
             bytes <= static_cast<uint64_t>(window.data + window.bytes - at);
    });
  }

  // Everything that a step may follow from here.
  void ExpectInside(const ResolvedHead& resolved) const {
    const HeadDescriptor& head = resolved.head;
    const uint64_t row = 2 * kDim, clusters = head.cluster_count;
    const struct {
      const char* name;
      const void* data;
      uint64_t bytes;
    } arrays[] = {
        {"sink keys", head.sink_keys, head.sink_count * row},
        {"sink values", head.sink_values, head.sink_count * row},
        {"ring keys", head.steady_keys, head.steady_capacity * row},
        {"ring values", head.steady_values, head.steady_capacity * row},
        {"centroids", head.centroids, clusters * kDim},
        {"value means", head.value_means, clusters * kDim},
        {"centroid scales", head.centroid_scales, clusters * 4},
        {"value scales", head.value_scales, clusters * 4},
        {"key spreads", head.key_spreads, clusters * 4},
        {"value spreads", head.value_spreads, clusters * 4},
        {"sizes", head.sizes, clusters * 2},
        {"cluster segment", head.cluster_segment, clusters * 2},
        {"first row", head.first_row, clusters * 4},
        {"first block", head.first_block, clusters * 4},
        {"block slots", head.block_slots, uint64_t{head.block_count} * 4},
        {"slots", head.slots, head.slot_count * 2 * kBlockRows * row},
        {"free slots", head.free_slots, uint64_t{head.free_capacity} * sizeof(FreeSlot)},
        {"log", head.log, head.log_capacity * sizeof(BlockUse)},
        {"state", head.state, sizeof(HeadState)},
        {"entries", resolved.segments.entries,
         resolved.segments.count * sizeof(resident::SegmentEntry)},
    };
    for (const auto& array : arrays) {
      ASSERT_TRUE(InRegion(array.data, array.bytes)) << array.name;
      ASSERT_EQ(reinterpret_cast<uintptr_t>(array.data) % 16, 0u) << array.name;
    }
    ASSERT_EQ(head.segment_count, resolved.segments.count);
    ASSERT_LE(resolved.segments.count, shape_.segment_capacity);
    ASSERT_LE(clusters, shape_.cluster_capacity);
    ASSERT_LE(head.retrieve_count, shape_.retrieve_capacity);
    for (uint32_t i = 0; i < resolved.segments.count; ++i) {
      const auto* entry =
          reinterpret_cast<const resident::SegmentEntry*>(resolved.segments.entries) + i;
      const SegmentCopy copy = DescribeSegment(resolved.segments, entry_, kDim, i);
      for (const float* mean : {copy.key_mean, copy.value_mean, copy.spread_share}) {
        ASSERT_TRUE(InRegion(mean, kDim * sizeof(float))) << i;
      }
      if (copy.keys == nullptr) continue;
      ASSERT_TRUE(InWindow(copy.keys, entry->token_count * row)) << i;
      ASSERT_TRUE(InWindow(copy.values, entry->token_count * row)) << i;
    }
  }

  std::mt19937_64 random_;
  const std::vector<HeadProblem> heads_;
  RegionImage image_;
  ResolveShape shape_;
  std::vector<ResolveWindow> windows_;
  ResolveEntry entry_;
};

template <typename T>
bool Holds(const void* at, const std::vector<T>& expected) {
  return std::equal(expected.begin(), expected.end(), static_cast<const T*>(at));
}

TEST_F(ResolveHeadTest, DescribesWhatWasWritten) {
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    SCOPED_TRACE(unit);
    const HeadProblem& written = heads_[unit];
    const uint64_t completed = image_.state(unit).completed_epoch;
    const ResolvedHead resolved = ResolveHead(entry_, shape_, unit);
    ASSERT_EQ(resolved.code, ResolveCode::kOk);
    ExpectInside(resolved);
    const HeadDescriptor& head = resolved.head;
    EXPECT_EQ(head.state, &image_.state(unit));
    EXPECT_EQ(head.state->started, completed + 1);
    EXPECT_EQ(head.state->completed_epoch, completed);
    EXPECT_EQ(head.cluster_count, written.cluster_count());
    EXPECT_EQ(head.segment_count, image_.header().unit.segment_capacity);
    EXPECT_EQ(head.steady_first, written.spec.steady_first);
    EXPECT_EQ(head.steady_capacity, written.spec.steady_capacity);
    EXPECT_TRUE(Holds(head.sizes, written.sizes));
    EXPECT_TRUE(Holds(head.centroids, written.centroids));
    EXPECT_TRUE(Holds(head.value_means, written.value_means));
    EXPECT_TRUE(Holds(head.centroid_scales, written.centroid_scales));
    EXPECT_TRUE(Holds(head.value_scales, written.value_scales));
    EXPECT_TRUE(Holds(head.key_spreads, written.key_spreads));
    EXPECT_TRUE(Holds(head.value_spreads, written.value_spreads));
    EXPECT_TRUE(Holds(head.cluster_segment, written.cluster_segment));
    EXPECT_TRUE(Holds(head.first_row, written.first_row));
    EXPECT_TRUE(Holds(head.first_block, written.first_block));
    EXPECT_TRUE(Holds(head.sink_keys, written.sink_keys));
    EXPECT_TRUE(Holds(head.sink_values, written.sink_values));
    EXPECT_TRUE(Holds(head.steady_keys, written.steady_keys));
    EXPECT_TRUE(Holds(head.steady_values, written.steady_values));
    for (uint32_t i = 0; i < resolved.segments.count; ++i) {
      const SegmentCopy copy = DescribeSegment(resolved.segments, entry_, kDim, i);
      if (i >= written.segments.size() || written.segments[i].keys.empty()) {
        EXPECT_EQ(copy.keys, nullptr) << i;
        EXPECT_EQ(copy.row_count, 0u) << i;
        continue;
      }
      EXPECT_TRUE(Holds(copy.keys, written.segments[i].keys)) << i;
      EXPECT_EQ(copy.row_count, written.segments[i].keys.size() / kDim) << i;
      EXPECT_TRUE(Holds(copy.values, written.segments[i].values)) << i;
      EXPECT_TRUE(Holds(copy.key_mean, written.segments[i].key_mean)) << i;
      EXPECT_TRUE(Holds(copy.value_mean, written.segments[i].value_mean)) << i;
      EXPECT_TRUE(Holds(copy.spread_share, written.segments[i].spread_share)) << i;
    }
  }
}

TEST_F(ResolveHeadTest, AnEmptyEntryTouchesNothing) {
  entry_.region = nullptr;
  const ResolvedHead resolved = ResolveHead(entry_, shape_, 1);
  EXPECT_EQ(resolved.code, ResolveCode::kEmpty);
  EXPECT_EQ(resolved.head.state, nullptr);
}

TEST_F(ResolveHeadTest, ARefusedStepIsNoneAndItsEpochPasses) {
  struct Row {
    std::string name;
    ResolveCode code;
    std::function<void()> change;
    bool begins = true;  // Whether the state is found at all.
  };
  resident::ResidentHeader& header = image_.header();
  const resident::ResidentHeader sound = header;
  resident::PublishedHead& published = image_.published(1);
  HeadState& state = image_.state(1);
  const ResolveCode malformed = ResolveCode::kMalformed, large = ResolveCode::kDoesNotFit;
  const std::vector<Row> rows = {
      {"closed", ResolveCode::kClosed, [&] { header.state = resident::kRegionClosed; }},
      {"unknown state", malformed, [&] { header.state = 7; }},
      {"nothing published", malformed, [&] { state.published = 0; }},
      {"magic", malformed, [&] { ++header.magic; }, false},
      {"version", malformed, [&] { ++header.version; }, false},
      {"version before", malformed, [&] { --header.version; }, false},
      {"sequence", malformed, [&] { ++header.sequence_id; }, false},
      {"element", malformed, [&] { header.element = 1; }, false},
      {"layers", malformed, [&] { ++header.layer_count; }, false},
      {"heads", malformed, [&] { ++header.kv_head_count; }, false},
      {"dim", malformed, [&] { header.head_dim = 128; }, false},
      {"larger than was said", malformed, [&] { ++header.region_bytes; }, false},
      {"states outside", malformed, [&] { header.states_offset = header.region_bytes; }, false},
      {"states between words", malformed, [&] { header.states_offset += 8; }, false},
      {"units outside", malformed, [&] { header.units_offset += 256; }, false},
      {"units that overflow", malformed, [&] { header.unit.unit_bytes = uint64_t{1} << 62; },
       false},
      {"ring of no rows", malformed, [&] { header.unit.ring_rows = 0; }, false},
      {"ring of part of a block", malformed, [&] { header.unit.ring_rows = 60; }, false},
      {"log outside", malformed, [&] { header.unit.log_capacity += 1 << 20; }, false},
      {"slots outside", malformed, [&] { header.unit.slots_offset = ~uint64_t{15}; }, false},
      {"too many clusters", malformed,
       [&] { published.cluster_count = header.unit.cluster_capacity + kClusterPad; }},
      {"part of a tile", malformed, [&] { published.cluster_count -= 1; }},
      {"clusters of no segment", malformed, [&] { published.segment_count = 0; }},
      {"too many segments", malformed,
       [&] { published.segment_count = header.unit.segment_capacity + 1; }},
      {"too many first tokens", malformed, [&] { published.sink_count = resident::kSinkRows + 1; }},
      {"more appended than the ring holds", malformed, [&] { state.appended = uint64_t{1} << 60; }},
      {"clusters beyond the step's", large,
       [&] { shape_.cluster_capacity = published.cluster_count - kClusterPad; }},
      {"segments beyond the step's", large,
       [&] { shape_.segment_capacity = header.unit.segment_capacity - 1; }},
  };
  const resident::PublishedHead sound_published = published;
  const HeadState sound_state = state;
  const ResolveShape sound_shape = shape_;
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    row.change();
    const ResolvedHead resolved = ResolveHead(entry_, shape_, 1);
    EXPECT_EQ(resolved.code, row.code);
    EXPECT_EQ(resolved.head.state, nullptr);
    EXPECT_EQ(resolved.head.cluster_count, 0u);
    EXPECT_EQ(resolved.segments.count, 0u);
    EXPECT_EQ(state.started, sound_state.started + (row.begins ? 1 : 0));
    EXPECT_EQ(state.completed_epoch, state.started);
    header = sound;
    published = sound_published;
    state = sound_state;
    shape_ = sound_shape;
  }
  EXPECT_EQ(ResolveHead(entry_, shape_, 1).code, ResolveCode::kOk);
  published.retrieve_count = shape_.retrieve_capacity + 1;
  const ResolvedHead bounded = ResolveHead(entry_, shape_, 1);
  EXPECT_EQ(bounded.code, ResolveCode::kOk);
  EXPECT_EQ(bounded.head.retrieve_count, shape_.retrieve_capacity);
}

TEST_F(ResolveHeadTest, AnEntryOfASegmentThatCannotBeHasNoRows) {
  resident::SegmentEntry& entry = image_.segments(0)[0];
  const resident::SegmentEntry sound = entry;
  const uint64_t window = windows_[sound.window].bytes;
  const std::vector<std::function<void()>> changes = {
      [&] { entry.window = entry_.window_count; },
      [&] { entry.token_count = 0; },
      [&] { entry.token_count = static_cast<uint32_t>(window / (2 * kDim) + 1); },
      [&] { entry.keys_offset = window; },
      [&] { entry.values_offset = window - 16; },
      [&] { entry.keys_offset += 2; },
      [&] { entry.values_offset = ~uint64_t{15}; },
  };
  const ResolvedHead resolved = ResolveHead(entry_, shape_, 0);
  EXPECT_NE(DescribeSegment(resolved.segments, entry_, kDim, 0).keys, nullptr);
  for (size_t i = 0; i < changes.size(); ++i) {
    changes[i]();
    const SegmentCopy copy = DescribeSegment(resolved.segments, entry_, kDim, 0);
    EXPECT_EQ(copy.keys, nullptr) << i;
    EXPECT_EQ(copy.values, nullptr) << i;
    EXPECT_EQ(copy.row_count, 0u) << i;
    EXPECT_TRUE(InRegion(copy.key_mean, 3 * kDim * sizeof(float))) << i;
    entry = sound;
  }
}

// Words of header, states, versions and segments, made into whatever comes.
TEST_F(ResolveHeadTest, RandomCorruptionNeverLeadsOutside) {
  const resident::ResidentHeader sound = image_.header();
  std::vector<std::pair<uint64_t, uint64_t>> targets = {
      {0, sizeof(sound)}, {sound.states_offset, kUnits * sizeof(HeadState)}};
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    const uint64_t base = image_.UnitOffset(unit);
    targets.emplace_back(base + sound.unit.published_offset,
                         resident::kAreas * sizeof(resident::PublishedHead));
    targets.emplace_back(base + sound.unit.segments_offset,
                         sound.unit.segment_capacity * sizeof(resident::SegmentEntry));
  }
  const auto value = [&]() -> uint64_t {
    switch (random_() % 5) {
      case 0:
        return random_();
      case 1:
        return random_() % 64;
      case 2:
        return ~uint64_t{0} - random_() % 64;
      case 3:
        return random_() % (2 * sound.region_bytes) & ~uint64_t{15};
      default:
        return uint64_t{1} << random_() % 64;
    }
  };
  // A state that seems to lie elsewhere is written there: all is made sound again each time.
  const std::vector<uint8_t> image(image_.bytes().begin(), image_.bytes().end());
  int resolved_count = 0;
  for (int i = 0; i < 10'000 && !HasFatalFailure(); ++i) {
    for (uint64_t edits = 1 + random_() % 3; edits > 0; --edits) {
      const auto& [offset, bytes] = targets[random_() % targets.size()];
      auto* word =
          reinterpret_cast<uint32_t*>(entry_.region + offset) + random_() % (bytes / 8) * 2;
      const uint64_t x = value();
      // Whole words, or one of two fields that share one.
      if (random_() % 2 == 0) word[0] = static_cast<uint32_t>(x);
      if (random_() % 2 == 0) word[1] = static_cast<uint32_t>(random_() % 2 == 0 ? x : x >> 32);
    }
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      const ResolvedHead resolved = ResolveHead(entry_, shape_, unit);
      if (resolved.code != ResolveCode::kOk) continue;
      ++resolved_count;
      ExpectInside(resolved);
    }
    std::copy(image.begin(), image.end(), image_.bytes().begin());
  }
  EXPECT_GT(resolved_count, 10'000);  // Of four times as many.
}

}  // namespace
}  // namespace wavekv::gpu
