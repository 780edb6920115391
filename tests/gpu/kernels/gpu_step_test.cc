// A decode step on the device against the float64 oracle, on fresh random inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gpu/kernels/step_launch.h"
#include "tests/gpu/kernels/device_batch.h"
#include "tests/gpu/kernels/device_test.h"
#include "tests/gpu/kernels/head_problem.h"

namespace wavekv::gpu {
namespace {

struct Row {
  std::string name;
  Element element = Element::kBF16;
  uint32_t dim = 128;
  uint32_t group = 4;
  uint32_t kv_heads = 2;
  std::vector<HeadSpec> sequences;  // One for each entry of the batch.
  std::vector<bool> present;        // Empty: all.
  CacheSpec cache;
  float query_length = 1;
  bool by_mass = false;
  bool graph = false;
  bool append = false;
  double offered = 0;  // Share of the cached blocks whose slots are offered before each step.
};

HeadSpec Segments(std::vector<uint32_t> tokens, uint32_t retrieve) {
  HeadSpec spec;
  spec.segment_tokens = std::move(tokens);
  spec.retrieve = retrieve;
  return spec;
}

HeadSpec WithHoles(HeadSpec spec) {
  spec.stale_clusters = 3 * kClusterPad;
  return spec;
}

HeadSpec Nothing() {
  HeadSpec spec;
  spec.sinks = 0;
  spec.steady = 0;
  spec.retrieve = 0;
  return spec;
}

HeadSpec Steady(uint32_t sinks, uint32_t steady, uint64_t first, uint32_t capacity) {
  HeadSpec spec = Segments({300}, 3);
  spec.sinks = sinks;
  spec.steady = steady;
  spec.steady_first = first;
  spec.steady_capacity = capacity;
  return spec;
}

HeadSpec Singles(uint32_t tokens, uint32_t retrieve) {
  HeadSpec spec = Segments({tokens}, retrieve);
  spec.cluster_tokens_max = 1;
  spec.spread = false;
  return spec;
}

std::vector<Row> Rows() {
  std::vector<Row> rows = {
      {.name = "OneSegment", .sequences = {Segments({2000}, 12)}},
      {.name = "DifferentLengths",
       .sequences = {Segments({8192, 1024}, 40), Nothing(), Segments({50}, 2), Segments({}, 0),
                     Segments({3000, 17, 1}, 5)},
       .graph = true},
      {.name = "EmptyEntryOfTheBatch",
       .sequences = {Segments({500}, 4), Segments({500}, 4), Segments({500}, 4)},
       .present = {true, false, true},
       .graph = true},
      {.name = "AllRetrieved", .sequences = {Segments({700}, 1000)}},
      {.name = "NothingRetrieved", .sequences = {Segments({700}, 0)}},
      {.name = "Holes",
       .sequences = {WithHoles(Segments({2000, 300}, 20)), WithHoles(Segments({40}, 1000))}},
      {.name = "AllCached", .sequences = {Segments({3000}, 20)}, .cache = {.cached = 1}},
      {.name = "NothingCachedNoFreeSlot",
       .sequences = {Segments({3000}, 20)},
       .cache = {.cached = 0, .free_per_miss = 0}},
      {.name = "FewFreeSlots",
       .sequences = {Segments({3000}, 60)},
       .cache = {.cached = 0.2, .free_per_miss = 0.02}},
      {.name = "TableFullOfNonsense",
       .sequences = {Segments({3000}, 60)},
       .cache = {.cached = 0.3, .free_per_miss = 0.05, .hostile = true}},
      {.name = "OffersOfCachedBlocks",
       .sequences = {Segments({3000}, 60), Segments({700}, 1000)},
       .cache = {.cached = 0.9, .free_per_miss = 0.1},
       .offered = 0.2},
      {.name = "AllCachedBlocksOffered",
       .sequences = {Segments({2000, 300}, 40)},
       .cache = {.cached = 1},
       .graph = true,
       .append = true,
       .offered = 1},
      {.name = "SteadyRingWrapsUnaligned",
       .sequences = {Steady(4, 200, 1003, 256), Steady(3, 250, 77, 256), Steady(0, 1, 8, 8),
                     Steady(8, 7, 5, 16), Steady(9, 2048, 100001, 2112)}},
      {.name = "Appends",
       .sequences = {Segments({1000}, 8), Steady(4, 10, 1003, 64)},
       .graph = true,
       .append = true},
      {.name = "ByMass", .sequences = {Segments({4000}, 30)}, .by_mass = true},
      {.name = "SharpQueries", .sequences = {Segments({4000}, 30)}, .query_length = 6},
      {.name = "FlatQueries", .sequences = {Segments({4000}, 30)}, .query_length = 0.01f},
      {.name = "ZeroQueries", .sequences = {Segments({400}, 3)}, .query_length = 0},
      {.name = "ClustersOfOneToken", .sequences = {Singles(6000, 100)}},
      {.name = "FewCachedAppends",
       .kv_heads = 3,
       .sequences = {Segments({5000}, 40), Nothing(), Segments({9000, 700}, 60)},
       .cache = {.cached = 0.1},
       .graph = true,
       .append = true},
  };
  // Every kernel that is built, with groups that fill a tile, do not, and need two.
  for (const Element element : {Element::kBF16, Element::kF16}) {
    for (const uint32_t dim : {64u, 128u, 256u}) {
      for (const uint32_t group : {1u, 3u, 8u, 9u, 16u}) {
        rows.push_back({.name = std::string(element == Element::kBF16 ? "BF16" : "F16") + "Dim" +
                                std::to_string(dim) + "Group" + std::to_string(group),
                        .element = element,
                        .dim = dim,
                        .group = group,
                        .sequences = {Segments({2100}, 20), Segments({130}, 20)}});
      }
    }
  }
  return rows;
}

void PrintTo(const Row& row, std::ostream* os) { *os << row.name; }

class StepTest : public testing::TestWithParam<Row> {
 protected:
  void SetUp() override {
    if (!HasDevice()) GTEST_SKIP() << kNoDevice;
    seed_ = TestSeed();
    random_.seed(seed_);
    RecordProperty("seed", std::to_string(seed_));
  }

  // Makes the heads and puts them on the device.
  void Prepare(const Row& row) {
    shape_.batch = static_cast<uint32_t>(row.sequences.size());
    shape_.kv_heads = row.kv_heads;
    shape_.group = row.group;
    shape_.head_dim = row.dim;
    shape_.element = row.element;
    shape_.scale = 1 / std::sqrt(static_cast<float>(row.dim));
    shape_.rank_by_mass = row.by_mass;
    shape_.retrieve_capacity = 1;
    for (const HeadSpec& spec : row.sequences) {
      for (uint32_t h = 0; h < row.kv_heads; ++h) {
        heads_.push_back(MakeHead(random_, row.element, row.dim, spec));
        const HeadProblem& head = heads_.back();
        shape_.cluster_capacity = std::max(shape_.cluster_capacity, head.cluster_count());
        shape_.segment_capacity =
            std::max(shape_.segment_capacity, static_cast<uint32_t>(head.segments.size()));
        shape_.retrieve_capacity =
            std::max(shape_.retrieve_capacity, std::min(spec.retrieve, head.real_clusters));
        ends_.push_back(spec.steady_first + spec.steady);
      }
    }
    present_ = row.present.empty() ? std::vector<bool>(shape_.batch, true) : row.present;
    ASSERT_TRUE(ValidateShape(shape_).ok()) << ValidateShape(shape_);
    auto batch = DeviceBatch::Make(shape_, heads_, present_, row.cache, random_);
    ASSERT_TRUE(batch.ok()) << batch.status();
    batch_ = *std::move(batch);
  }

  std::vector<uint16_t> RandomBits(size_t count, float length) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> bits(count);
    for (uint16_t& x : bits) x = ToBits(shape_.element, length * normal(random_));
    return bits;
  }

  void SetInputs(const Row& row) {
    queries_ = RandomBits(heads_.size() * row.group * row.dim, row.query_length);
    std::vector<uint16_t> keys, values;
    if (row.append) {
      keys = RandomBits(heads_.size() * row.dim, 1);
      values = RandomBits(heads_.size() * row.dim, 1);
      for (size_t unit = 0; unit < heads_.size(); ++unit) {
        const auto part = [&](const std::vector<uint16_t>& all) {
          return std::vector<uint16_t>(all.begin() + unit * row.dim,
                                       all.begin() + (unit + 1) * row.dim);
        };
        AppendToRing(&heads_[unit], ends_[unit]++, part(keys), part(values));
      }
    }
    ASSERT_TRUE(batch_->SetInputs(queries_, keys, values).ok());
  }

  StepOracle Oracle(size_t unit) const {
    const size_t count = size_t{shape_.group} * shape_.head_dim;
    std::vector<double> queries(count);
    for (size_t i = 0; i < count; ++i) {
      queries[i] = FromBits(shape_.element, queries_[unit * count + i]);
    }
    return StepOracle(heads_[unit], std::move(queries), shape_.group, shape_.scale, ends_[unit]);
  }

  // The best clusters, but for those whose ranks float32 and 15-bit queries cannot tell apart.
  void CheckSelection(size_t unit, const StepResults& results) const {
    constexpr double kTolerance = 0.02;
    const std::vector<uint32_t>& retrieved = results.retrieved[unit];
    const HeadProblem& head = heads_[unit];
    ASSERT_EQ(retrieved.size(), std::min(head.spec.retrieve, head.real_clusters));
    ASSERT_TRUE(std::is_sorted(retrieved.begin(), retrieved.end()));
    ASSERT_EQ(std::set<uint32_t>(retrieved.begin(), retrieved.end()).size(), retrieved.size());
    if (retrieved.empty()) return;
    const std::vector<double> ranks = Oracle(unit).Ranks(shape_.rank_by_mass);
    std::vector<double> sorted = ranks;
    std::nth_element(sorted.begin(), sorted.begin() + (retrieved.size() - 1), sorted.end(),
                     std::greater<>());
    const double threshold = sorted[retrieved.size() - 1];
    std::vector<bool> chosen(ranks.size());
    for (const uint32_t c : retrieved) {
      ASSERT_LT(c, ranks.size());
      chosen[c] = true;
      EXPECT_GE(ranks[c], threshold * (1 - kTolerance)) << "chosen cluster " << c;
    }
    for (size_t c = 0; c < ranks.size(); ++c) {
      if (chosen[c]) continue;
      EXPECT_LE(ranks[c], threshold * (1 + kTolerance)) << "left cluster " << c;
    }
  }

  void CheckOutput(size_t unit, const StepResults& results) const {
    // bf16 weights err by 2^-9 at most each, as does the rounding of the output; float16's by
    // 2^-12.
    const double tolerance = shape_.element == Element::kBF16 ? 5e-3 : 1.5e-3;
    const StepOracle::Output expected = Oracle(unit).Attend(results.retrieved[unit]);
    for (uint32_t g = 0; g < shape_.group; ++g) {
      double error = 0, norm = 0;
      for (uint32_t d = 0; d < shape_.head_dim; ++d) {
        const double reference = expected.out[g * shape_.head_dim + d];
        const double out = results.out[(unit * shape_.group + g) * shape_.head_dim + d];
        error += std::pow(out - reference, 2);
        norm += reference * reference;
      }
      EXPECT_LE(std::sqrt(error), tolerance * std::sqrt(norm)) << "unit " << unit << " head " << g;
      const double lse = results.lse[unit * shape_.group + g];
      if (std::isinf(expected.lse[g])) {
        EXPECT_EQ(lse, expected.lse[g]);
      } else {
        EXPECT_NEAR(lse, expected.lse[g], 2e-3) << "unit " << unit << " head " << g;
      }
    }
  }

  // Every block of a chosen cluster is a hit or a miss, once, and what was missed lies in its slot.
  void CheckBlocks(size_t unit, const StepResults& results, const HeadState& before,
                   const std::vector<int32_t>& table_before) const {
    const HeadProblem& head = heads_[unit];
    const DeviceHead& device = batch_->head(unit);
    const HeadDescriptor& descriptor = device.descriptor();
    const auto state = device.State();
    const auto table = device.BlockSlots();
    const auto slots = device.Slots();
    const auto log = device.Log();
    ASSERT_TRUE(state.ok() && table.ok() && slots.ok() && log.ok());
    uint32_t hits = 0, misses = 0;
    std::set<uint32_t> blocks;
    for (const uint32_t c : results.retrieved[unit]) {
      for (uint32_t first = 0; first < head.sizes[c]; first += kBlockRows) {
        const uint32_t block = head.first_block[c] + first / kBlockRows;
        blocks.insert(block);
        const bool hit = table_before[block] >= 0 &&
                         static_cast<uint32_t>(table_before[block]) < descriptor.slot_count;
        hit ? ++hits : ++misses;
        const int32_t slot = (*table)[block];
        if (slot < 0 || static_cast<uint32_t>(slot) >= descriptor.slot_count) continue;
        const SegmentArrays& segment = head.segments[head.cluster_segment[c]];
        const size_t rows = std::min<size_t>(kBlockRows, head.sizes[c] - first) * head.dim;
        const size_t from = (size_t{head.first_row[c]} + first) * head.dim;
        const uint16_t* cached = slots->data() + size_t(slot) * 2 * kBlockRows * head.dim;
        EXPECT_TRUE(std::equal(cached, cached + rows, segment.keys.begin() + from)) << block;
        cached += kBlockRows * head.dim;
        EXPECT_TRUE(std::equal(cached, cached + rows, segment.values.begin() + from)) << block;
      }
    }
    EXPECT_EQ(results.counts[unit].hits, hits);
    EXPECT_EQ(results.counts[unit].misses, misses);
    EXPECT_EQ(state->hits, before.hits + hits);
    EXPECT_EQ(state->misses, before.misses + misses);
    EXPECT_EQ(state->completed_epoch, before.completed_epoch + 1);
    EXPECT_EQ(state->free_seen, before.free_tail);
    const uint64_t free_before = before.free_tail - before.free_head;
    EXPECT_EQ(state->free_head - before.free_head, std::min<uint64_t>(misses, free_before));
    ASSERT_EQ(state->log_end, before.log_end + hits + misses);
    std::set<uint32_t> logged;
    std::set<uint64_t> places;
    uint32_t logged_misses = 0;
    for (uint64_t i = before.log_end; i < state->log_end; ++i) {
      const BlockUse& use = (*log)[i % log->size()];
      const uint32_t block = use.block & ~kMissBit;
      logged.insert(block);
      EXPECT_TRUE(use.slot < 0 || (*table)[block] == use.slot) << block;
      const bool claim = (use.block & kMissBit) != 0 && use.slot >= 0;
      EXPECT_EQ(use.place != kNoPlace, claim) << block;
      if (claim) {
        EXPECT_GE(use.place, before.free_head) << block;
        EXPECT_LT(use.place, state->free_head) << block;
        EXPECT_TRUE(places.insert(use.place).second) << block;
      }
      logged_misses += (use.block & kMissBit) != 0;
    }
    EXPECT_EQ(logged, blocks);
    EXPECT_EQ(logged_misses, misses);
  }

  // The table that the next step looks blocks up in: without those whose slots it finds on offer.
  std::vector<int32_t> TableOfNextStep(uint32_t unit) const {
    const DeviceHead& device = batch_->head(unit);
    std::vector<int32_t> table = device.BlockSlots().value();
    const std::vector<FreeSlot> ring = device.FreeSlots().value();
    const HeadState state = device.State().value();
    for (uint64_t place = state.free_seen; place < state.free_tail; ++place) {
      const FreeSlot& offer = ring[place % ring.size()];
      if (offer.block >= table.size()) continue;
      if (table[offer.block] == static_cast<int32_t>(offer.slot)) table[offer.block] = -1;
    }
    return table;
  }

  // Offers slots of cached blocks of every unit that is there.
  void Offer(double share) {
    for (uint32_t unit = 0; unit < heads_.size(); ++unit) {
      ASSERT_TRUE(batch_->mutable_head(unit).OfferCached(share, random_).ok());
    }
  }

  // One step, everything checked.
  void RunStep(const Row& row) {
    SetInputs(row);
    if (row.offered > 0) Offer(row.offered);
    std::vector<HeadState> states;
    std::vector<std::vector<int32_t>> tables;
    for (uint32_t unit = 0; unit < heads_.size(); ++unit) {
      states.push_back(*batch_->head(unit).State());
      tables.push_back(TableOfNextStep(unit));
    }
    const auto results = batch_->Run(row.graph);
    ASSERT_TRUE(results.ok()) << results.status();
    for (size_t unit = 0; unit < heads_.size(); ++unit) {
      SCOPED_TRACE("unit " + std::to_string(unit));
      if (!present_[unit / row.kv_heads]) {
        for (uint32_t g = 0; g < row.group; ++g) {
          EXPECT_EQ(results->lse[unit * row.group + g], -HUGE_VALF);
          for (uint32_t d = 0; d < row.dim; ++d) {
            EXPECT_EQ(results->out[(unit * row.group + g) * row.dim + d], 0);
          }
        }
        continue;
      }
      CheckSelection(unit, *results);
      CheckOutput(unit, *results);
      CheckBlocks(unit, *results, states[unit], tables[unit]);
    }
  }

  uint64_t seed_ = 0;
  std::mt19937_64 random_;
  StepShape shape_;
  std::vector<HeadProblem> heads_;
  std::vector<bool> present_;
  std::vector<uint64_t> ends_;  // [units] end of the steady ring
  std::unique_ptr<DeviceBatch> batch_;
  std::vector<uint16_t> queries_;
};

TEST_P(StepTest, GivesWhatTheOracleGives) {
  SCOPED_TRACE("WAVEKV_TEST_SEED=" + std::to_string(seed_));
  Prepare(GetParam());
  if (HasFatalFailure()) return;
  // Later steps find what the earlier ones fetched.
  for (int i = 0; i < 3 && !HasFailure(); ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    RunStep(GetParam());
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, StepTest, testing::ValuesIn(Rows()),
                         [](const auto& info) { return info.param.name; });

using StepSingleTest = StepTest;

TEST_P(StepSingleTest, RefetchesNothing) {
  Prepare(GetParam());
  if (HasFatalFailure()) return;
  SetInputs(GetParam());
  const auto first = batch_->Run(true), second = batch_->Run(true);
  ASSERT_TRUE(first.ok() && second.ok());
  for (size_t unit = 0; unit < heads_.size(); ++unit) {
    EXPECT_GT(first->counts[unit].misses, 0u);
    EXPECT_EQ(second->counts[unit].misses, 0u);
    EXPECT_EQ(second->retrieved[unit], first->retrieved[unit]);
  }
}

// Rule 2 of docs/decisions/015-resident-region.md: what a slot on offer held is missed by the step
// that sees the offer, the block that the step then fills it with is found by the next one.
TEST_P(StepSingleTest, AnOfferedSlotChangesItsBlock) {
  SCOPED_TRACE("WAVEKV_TEST_SEED=" + std::to_string(seed_));
  Row row = GetParam();
  row.cache = {.cached = 1};
  Prepare(row);
  if (HasFatalFailure()) return;
  SetInputs(row);
  const auto all_hit = batch_->Run(true);
  ASSERT_TRUE(all_hit.ok()) << all_hit.status();
  Offer(0.5);
  std::vector<HeadState> offered;
  std::vector<std::vector<int32_t>> tables;
  for (uint32_t unit = 0; unit < heads_.size(); ++unit) {
    EXPECT_EQ(all_hit->counts[unit].misses, 0u);
    offered.push_back(*batch_->head(unit).State());
    tables.push_back(TableOfNextStep(unit));
  }
  const auto refilled = batch_->Run(true), found = batch_->Run(true);
  ASSERT_TRUE(refilled.ok() && found.ok());
  for (uint32_t unit = 0; unit < heads_.size(); ++unit) {
    SCOPED_TRACE("unit " + std::to_string(unit));
    const DeviceHead& device = batch_->head(unit);
    const std::vector<BlockUse> log = *device.Log();
    const std::vector<FreeSlot> ring = *device.FreeSlots();
    const std::vector<int32_t> table = *device.BlockSlots();
    // Of one step with the same queries: as many blocks as were asked for with all of them cached.
    const uint32_t asked = all_hit->counts[unit].hits;
    uint32_t left = 0, changed = 0;
    for (uint32_t i = 0; i < asked; ++i) {
      const BlockUse& use = log[(offered[unit].log_end + i) % log.size()];
      const uint32_t block = use.block & ~kMissBit;
      EXPECT_EQ((use.block & kMissBit) != 0, tables[unit][block] < 0) << block;
      if ((use.block & kMissBit) == 0) continue;
      ++left;
      ASSERT_NE(use.place, kNoPlace) << block;  // There are more offers than misses.
      const FreeSlot& offer = ring[use.place % ring.size()];
      EXPECT_EQ(use.slot, static_cast<int32_t>(offer.slot)) << block;
      EXPECT_EQ(table[block], use.slot) << block;
      if (offer.block == block) continue;
      ++changed;
      EXPECT_NE(table[offer.block], use.slot) << offer.block;
    }
    EXPECT_GT(left, 0u);
    EXPECT_GT(changed, 0u);
    EXPECT_EQ(refilled->counts[unit].misses, left);
    EXPECT_EQ(refilled->counts[unit].hits, asked - left);
    EXPECT_EQ(found->counts[unit].hits, asked);
    EXPECT_EQ(found->counts[unit].misses, 0u);
    for (const auto* results : {&*all_hit, &*refilled, &*found}) CheckOutput(unit, *results);
  }
}

TEST_P(StepSingleTest, ADescriptorThatIsBeingWrittenLeavesTheLatchedOne) {
  Prepare(GetParam());
  if (HasFatalFailure()) return;
  SetInputs(GetParam());
  const auto first = batch_->Run(false);
  ASSERT_TRUE(batch_->SetVersion(0, 3).ok());
  const auto second = batch_->Run(false);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_EQ(first->retrieved, second->retrieved);
  EXPECT_EQ(first->lse.size(), second->lse.size());
  for (size_t i = 0; i < first->lse.size(); ++i) {
    EXPECT_NEAR(first->lse[i], second->lse[i], 1e-4);
  }
}

TEST_P(StepSingleTest, AFullRingRefusesTheToken) {
  Row row = GetParam();
  row.sequences = {Steady(4, 64, 1000, 64)};
  Prepare(row);
  if (HasFatalFailure()) return;
  row.append = true;
  const std::vector<uint16_t> rows = RandomBits(heads_.size() * row.dim, 1);
  queries_ = RandomBits(heads_.size() * row.group * row.dim, 1);
  ASSERT_TRUE(batch_->SetInputs(queries_, rows, rows).ok());
  const auto results = batch_->Run(false);
  ASSERT_TRUE(results.ok()) << results.status();
  for (size_t unit = 0; unit < heads_.size(); ++unit) {
    const auto state = batch_->head(unit).State();
    ASSERT_TRUE(state.ok());
    EXPECT_EQ(state->overflows, 1u);
    EXPECT_EQ(state->appended, 1064u);
    CheckOutput(unit, *results);
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, StepSingleTest,
                         testing::Values(Row{.name = "Misses",
                                             .sequences = {Segments({3000}, 20)},
                                             .cache = {.cached = 0}}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace wavekv::gpu
