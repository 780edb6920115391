// Labels that a client gives in place of the engine's k-means: which segments use them, what comes
// between, and that nothing wrong changes anything.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "daemon/engine/segment_labels.h"
#include "gmock/gmock.h"
#include "index/cluster/partition.h"
#include "index/cluster/spherical_kmeans.h"
#include "index/simd/kernels.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/gated_backend.h"

namespace wavekv::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

// What a LabelRange points to.
struct LabelBuffer {
  LabelRange range;
  std::vector<uint16_t> labels;

  LabelRange Borrow() const {
    LabelRange borrowed = range;
    borrowed.labels = std::as_bytes(std::span(labels));
    return borrowed;
  }
};

class LabelsTest : public EngineTest {
 protected:
  std::vector<PlannedSegment> Plan(SequenceRef sequence, uint32_t layer, uint64_t token_count) {
    const absl::StatusOr<IndexPlan> plan =
        engine_->PlanIndex(kTenant, sequence, layer, token_count);
    EXPECT_TRUE(plan.ok()) << plan.status();
    return plan.ok() ? plan->segments : std::vector<PlannedSegment>();
  }

  // The labels that the engine's own k-means would find.
  LabelBuffer KMeansLabels(const TokenData& data, uint32_t layer, const PlannedSegment& segment) {
    LabelBuffer buffer{{segment.first_position, segment.token_count, {}}, {}};
    const uint32_t dim = shape().key_dim;
    for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
      std::vector<float> keys(size_t{segment.token_count} * dim);
      for (uint32_t i = 0; i < segment.token_count; ++i) {
        kernels_.to_float(shape().dtype, data.Key(layer, segment.first_position + i, head), dim,
                          &keys[size_t{i} * dim]);
      }
      const std::vector<float> points = CentreKeys(keys, segment.token_count, dim);
      const std::vector<float> initial =
          EvenlySpaced(points, segment.token_count, dim, segment.cluster_count);
      const KMeansResult found =
          SphericalKMeans(kernels_, {points, initial, segment.token_count, segment.cluster_count,
                                     dim, spec_.index.kmeans_iterations});
      buffer.labels.insert(buffer.labels.end(), found.labels.begin(), found.labels.end());
    }
    return buffer;
  }

  // Tokens dealt out to the clusters in turn, each head starting elsewhere.
  LabelBuffer DealtLabels(uint64_t first, uint32_t tokens, uint32_t clusters) {
    LabelBuffer buffer{{first, tokens, {}}, {}};
    for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
      for (uint32_t i = 0; i < tokens; ++i) {
        buffer.labels.push_back(static_cast<uint16_t>((i + head) % clusters));
      }
    }
    return buffer;
  }
  LabelBuffer DealtLabels(const PlannedSegment& segment) {
    return DealtLabels(segment.first_position, segment.token_count, segment.cluster_count);
  }

  absl::StatusOr<LabelOutcome> TryGive(SequenceRef sequence, uint32_t layer,
                                       const std::vector<LabelBuffer>& buffers) {
    std::vector<LabelRange> ranges;
    for (const LabelBuffer& buffer : buffers) ranges.push_back(buffer.Borrow());
    return engine_->GiveLabels(kTenant, sequence, layer, ranges);
  }
  uint32_t Give(SequenceRef sequence, uint32_t layer, const std::vector<LabelBuffer>& buffers) {
    const absl::StatusOr<LabelOutcome> outcome = TryGive(sequence, layer, buffers);
    EXPECT_TRUE(outcome.ok()) << outcome.status();
    return outcome.ok() ? outcome->kept_count : 0;
  }
  // Dealt labels of all layers for what a BuildIndex at token_count will cut.
  void GiveAll(SequenceRef sequence, uint64_t token_count) {
    for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
      std::vector<LabelBuffer> buffers;
      for (const PlannedSegment& segment : Plan(sequence, layer, token_count)) {
        buffers.push_back(DealtLabels(segment));
      }
      EXPECT_EQ(Give(sequence, layer, buffers), buffers.size());
    }
  }

  // "4+1020 given, ..." of one layer's segments, of its first head.
  std::vector<std::string> Segments(SequenceRef sequence, uint32_t layer = 0) {
    const absl::StatusOr<IndexDescription> index =
        engine_->DescribeIndex(kTenant, sequence, layer, 0);
    EXPECT_TRUE(index.ok()) << index.status();
    std::vector<std::string> segments;
    for (const SegmentStatus& segment : index->segments) {
      segments.push_back(std::to_string(segment.first_position) + "+" +
                         std::to_string(segment.token_count) +
                         (segment.given_labels ? " given" : " own"));
    }
    return segments;
  }

  const simd::Kernels& kernels_ = simd::ActiveKernels();
};

// The whole way, with the CPU's k-means in the place of the GPU's: the same index, bit for bit.
TEST_F(LabelsTest, TheIndexIsTheOneThatItsOwnLabelsGive) {
  const uint64_t seed = FreshSeed();
  const uint64_t tokens = 3000;
  const TokenData data(shape(), tokens, seed);
  const SequenceRef own = Create(spec_), given = Create(spec_);
  Insert(own, data, 0, tokens);
  Build(own);
  for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
    std::vector<LabelBuffer> buffers;
    for (const PlannedSegment& segment : Plan(given, layer, tokens)) {
      buffers.push_back(KMeansLabels(data, layer, segment));
    }
    EXPECT_EQ(Give(given, layer, buffers), 3u);
  }
  Insert(given, data, 0, tokens);
  Build(given);
  EXPECT_THAT(Segments(own), ElementsAre("4+1020 own", "1024+1024 own", "2048+888 own"));
  EXPECT_THAT(Segments(given), ElementsAre("4+1020 given", "1024+1024 given", "2048+888 given"));
  EXPECT_EQ(Fingerprint(given, seed), Fingerprint(own, seed));
  const BuildStats builds = engine_->Stats().builds;
  EXPECT_EQ(builds.segments_own, 6u);
  EXPECT_EQ(builds.segments_given, 6u);
  EXPECT_EQ(builds.labels_unused, 0u);
}

// Keys that are all alike have no clusters of their own: what is there is what the labels say.
TEST_F(LabelsTest, ClustersAreThoseOfTheLabels) {
  TokenData data(shape(), 1200, FreshSeed());
  for (uint32_t head = 0; head < 2; ++head) {
    for (uint64_t position = 0; position < 1200; ++position) {
      data.SetKey(0, position, head, std::vector<float>(shape().key_dim, 1.0f + head));
    }
  }
  const SequenceRef sequence = Create(spec_);
  ASSERT_EQ(Give(sequence, 0, {DealtLabels(4, 1020, 64)}), 1u);
  Insert(sequence, data, 0, 1200);
  WaitIdle(sequence);
  QueryBuffers buffers(shape(), sequence, 0, RandomQueries(shape(), 1));
  buffers.query.budget = ZoneBudget{.kind = BudgetKind::kRatio, .value = 1.0};
  const auto all = engine_->Query(kTenant, buffers.query, {.inline_rows = true});
  ASSERT_TRUE(all.ok()) << all.status();
  for (const HeadZones& head : all->heads) {
    ASSERT_EQ(head.retrieved.size(), 64u);
    size_t row = head.steady_tokens;
    for (const RetrievedCluster& cluster : head.retrieved) {
      const uint64_t label = (head.inline_positions[row] - 4 + head.kv_head) % 64;
      EXPECT_EQ(cluster.size, (1020 - (label + 64 - head.kv_head) % 64 + 63) / 64);
      for (uint32_t i = 0; i < cluster.size; ++i, ++row) {
        EXPECT_EQ((head.inline_positions[row] - 4 + head.kv_head) % 64, label);
      }
    }
  }
}

TEST_F(LabelsTest, APlanSaysWhatWillBeCutAndIsNot) {
  const TokenData data(shape(), 4000, FreshSeed());
  spec_.index.dense_layers = {1};
  const SequenceRef sequence = Create(spec_);
  const auto plan = [&](uint64_t tokens, uint32_t layer = 0) {
    std::vector<std::string> text;
    for (const PlannedSegment& segment : Plan(sequence, layer, tokens)) {
      text.push_back(std::to_string(segment.first_position) + "+" +
                     std::to_string(segment.token_count) + " " +
                     std::to_string(segment.cluster_count));
    }
    return text;
  };
  EXPECT_THAT(plan(0), ElementsAre());
  EXPECT_THAT(plan(300), ElementsAre());
  EXPECT_THAT(plan(2200), ElementsAre("4+1020 64", "1024+1024 64"));
  EXPECT_THAT(plan(2500), ElementsAre("4+1020 64", "1024+1024 64", "2048+388 25"));
  EXPECT_THAT(plan(2500, 1), ElementsAre()) << "dense";
  Insert(sequence, data, 0, 1200);
  EXPECT_THAT(plan(2200), ElementsAre("1024+1024 64")) << "the first is planned";
  EXPECT_THAT(plan(0), ElementsAre()) << "176 tokens are no segment";
  for (const uint64_t wrong : {1199u, 8193u}) {
    const auto refused = engine_->PlanIndex(kTenant, sequence, 0, wrong);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr("1200"));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(engine_->PlanIndex(kTenant, sequence, 2, 0).status()));
  EXPECT_TRUE(absl::IsNotFound(engine_->PlanIndex("uid:2", sequence, 0, 0).status()));
}

TEST_F(LabelsTest, WhatCannotBeIsRefusedWhole) {
  struct Row {
    std::string error;
    std::function<void(LabelBuffer*)> change;
  };
  const std::vector<Row> rows = {
      {"expected one or more", [](LabelBuffer* b) { b->range.token_count = 0; }},
      {"max_tokens", [](LabelBuffer* b) { b->range.first_position = 8192 - 1023; }},
      // The end wraps around.
      {"max_tokens", [](LabelBuffer* b) { b->range.first_position = UINT64_MAX - 100; }},
      {"max_tokens", [](LabelBuffer* b) { b->range.token_count = UINT32_MAX; }},
      {"4096", [](LabelBuffer* b) { b->labels.pop_back(); }},
      {"4096", [](LabelBuffer* b) { b->labels.push_back(0); }},
      {"4096", [](LabelBuffer* b) { b->labels.clear(); }},
      {"position 1027 of KV head 1 has label 64", [](LabelBuffer* b) { b->labels[1027] = 64; }},
      {"position 2047 of KV head 1 has label 65535",
       [](LabelBuffer* b) { b->labels.back() = 65535; }},
  };
  const TokenData data(shape(), 3000, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  for (const Row& row : rows) {
    // The first of the two is fine.
    std::vector<LabelBuffer> buffers = {DealtLabels(4, 1020, 64), DealtLabels(1024, 1024, 64)};
    row.change(&buffers[1]);
    const auto refused = TryGive(sequence, 0, buffers);
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << row.error << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr(row.error));
  }
  // 8,192 tokens are 64 segments of 128.
  const std::vector<LabelBuffer> many(66, DealtLabels(4, 1020, 64));
  EXPECT_THAT(std::string(TryGive(sequence, 0, many).status().message()),
              HasSubstr("labels of 66 segments, expected at most 65"));
  const std::vector<LabelBuffer> good = {DealtLabels(4, 1020, 64)};
  EXPECT_TRUE(absl::IsInvalidArgument(TryGive(sequence, 2, good).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(TryGive({sequence.id, Generation(0)}, 0, good).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(TryGive({sequence.id, Generation(9)}, 0, good).status()));
  EXPECT_TRUE(absl::IsNotFound(TryGive({SequenceId(1), Generation(1)}, 0, good).status()));
  const BuildStats builds = engine_->Stats().builds;
  EXPECT_EQ(builds.labels_left_aside, 0u);
  EXPECT_EQ(builds.labels_unused, 0u) << "nothing was kept of what was refused";
  Insert(sequence, data, 0, 3000);
  Build(sequence);
  EXPECT_THAT(Segments(sequence), ElementsAre("4+1020 own", "1024+1024 own", "2048+888 own"));
}

TEST_F(LabelsTest, WhatFitsNoCutIsLeftAsideAndCounted) {
  struct Row {
    std::string what;
    uint64_t first;
    uint32_t tokens;
    uint32_t kept;
  };
  const TokenData data(shape(), 3000, FreshSeed());
  spec_.index.dense_layers = {1};
  const SequenceRef sequence = Create(spec_);
  uint64_t left_aside = 0, kept = 0;
  for (const Row& row : std::vector<Row>{
           {"in the sink", 0, 1024, 0},
           {"across a boundary", 1000, 1024, 0},
           {"two stretches", 1024, 2048, 0},
           {"shorter than any", 1024, 255, 0},
           {"another end than the cut's", 2048, 900, 1},  // Who knows? Not yet.
           {"another beginning", 1100, 948, 1},
       }) {
    EXPECT_EQ(Give(sequence, 0, {DealtLabels(row.first, row.tokens, 8)}), row.kept) << row.what;
    kept += row.kept;
    left_aside += 1 - row.kept;
    EXPECT_EQ(engine_->Stats().builds.labels_left_aside, left_aside) << row.what;
  }
  EXPECT_EQ(Give(sequence, 1, {DealtLabels(4, 1020, 64)}), 0u) << "dense";
  EXPECT_EQ(engine_->Stats().builds.labels_unused, 0u) << "they are held yet";
  Insert(sequence, data, 0, 3000);
  Build(sequence);
  EXPECT_THAT(Segments(sequence), ElementsAre("4+1020 own", "1024+1024 own", "2048+888 own"));
  // Planned by now.
  EXPECT_EQ(Give(sequence, 0, {DealtLabels(2048, 888, 8)}), 0u);
  const BuildStats builds = engine_->Stats().builds;
  EXPECT_EQ(builds.labels_left_aside, left_aside + 2);
  EXPECT_EQ(builds.labels_unused, kept - 1) << "another cut came; one ends behind it";
  EXPECT_EQ(builds.segments_given, 0u);
  ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  EXPECT_EQ(engine_->Stats().builds.labels_unused, kept);
}

TEST_F(LabelsTest, LabelsOfADroppedSequenceGo) {
  const SequenceRef sequence = Create(spec_);
  GiveAll(sequence, 3000);
  ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  EXPECT_EQ(engine_->Stats().builds.labels_unused, 6u);
}

// What a truncation leaves is what its segments would have been: those with the local window behind
// them. The others' tokens may be written anew.
TEST_F(LabelsTest, TruncationForgetsThoseWhoseTokensMayChange) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed), other(shape(), 3000, seed + 1);
  SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 1100);
  GiveAll(sequence, 3000);
  const auto truncated = engine_->TruncateSequence(kTenant, sequence, 1024 + 64);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  EXPECT_TRUE(
      absl::IsFailedPrecondition(TryGive(sequence, 0, {DealtLabels(1024, 1024, 64)}).status()))
      << "made of tokens that are gone";
  sequence.generation = truncated->generation;
  Insert(sequence, other, 1024 + 64, 3000 - 1024 - 64);
  Build(sequence);
  EXPECT_THAT(Segments(sequence), ElementsAre("4+1020 given", "1024+1024 own", "2048+888 own"));
}

TEST_F(LabelsTest, NewLabelsTakeThePlaceOfThoseTheyOverlap) {
  const TokenData data(shape(), 3000, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  // As a prompt that is fed in chunks does: the rest of the first chunk is part of a stretch later.
  GiveAll(sequence, 1700);
  Insert(sequence, data, 0, 1700);
  GiveAll(sequence, 3000);
  EXPECT_EQ(engine_->Stats().builds.labels_unused, 2u);
  Insert(sequence, data, 1700, 1300);
  Build(sequence);
  EXPECT_THAT(Segments(sequence), ElementsAre("4+1020 given", "1024+1024 given", "2048+888 given"));
  EXPECT_EQ(engine_->Stats().builds.labels_unused, 2u);
}

// Whatever was inserted, built, truncated and given before: what PlanIndex names, GiveLabels keeps,
// and a BuildIndex then uses. And every segment's labels that were kept count once, as used or not.
TEST_F(LabelsTest, WhatIsPlannedIsKept) {
  constexpr uint64_t kMaxTokens = 4096;
  StartEngine({.epoch = 3, .build_threads = 1, .compute_threads = 1}, uint64_t{256} << 20);
  spec_ = SmallSpec(kMaxTokens);
  spec_.shape.layer_count = 1;
  spec_.shape.kv_head_count = 1;
  spec_.index.kmeans_iterations = 1;
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  const auto below = [&random](uint64_t bound) { return random() % bound; };
  const TokenData data(shape(), kMaxTokens, seed);
  SequenceRef sequence = Create(spec_);
  uint64_t held = 0, kept = 0;
  std::string story;
  const auto give = [&](uint64_t token_count) {
    const std::vector<PlannedSegment> plan = Plan(sequence, 0, token_count);
    std::vector<LabelBuffer> buffers;
    for (const PlannedSegment& segment : plan) buffers.push_back(DealtLabels(segment));
    const uint32_t now = Give(sequence, 0, buffers);
    kept += now;
    EXPECT_EQ(now, plan.size()) << "planned for " << token_count << story;
    return plan;
  };
  for (int step = 0; step < 300 && !HasFailure(); ++step) {
    switch (below(5)) {
      case 0:
      case 1: {
        const uint64_t count = std::min(kMaxTokens - held, 1 + below(600));
        if (count == 0) break;
        Insert(sequence, data, held, count);
        held += count;
        story += "\ninserted, now " + std::to_string(held);
        break;
      }
      case 2: {
        held -= std::min(held, below(below(4) == 0 ? 2500 : 200));
        WaitIdle(sequence);
        const auto index = engine_->DescribeIndex(kTenant, sequence, 0, 0);
        ASSERT_TRUE(index.ok()) << index.status();
        if (!index->segments.empty() && below(2) == 0) {  // It has just the window behind.
          const SegmentStatus& segment = index->segments[below(index->segments.size())];
          held = std::min(held, segment.first_position + segment.token_count + kLocalTokens);
        }
        const auto truncated = engine_->TruncateSequence(kTenant, sequence, held);
        ASSERT_TRUE(truncated.ok()) << truncated.status();
        sequence.generation = truncated->generation;
        story += "\ntruncated to " + std::to_string(held);
        give(0);
        break;
      }
      case 3:
        give(held + below(kMaxTokens - held + 1));
        story += "\ngiven";
        break;
      default: {
        std::vector<std::string> expected;
        for (const PlannedSegment& segment : give(0)) {
          expected.push_back(std::to_string(segment.first_position) + "+" +
                             std::to_string(segment.token_count) + " given");
        }
        Build(sequence);
        story += "\nbuilt";
        EXPECT_THAT(Segments(sequence), IsSupersetOf(expected)) << story;
      }
    }
  }
  ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  // The one builder thread has let go of all that it did before this.
  const SequenceRef last = Create(spec_);
  Insert(last, data, 0, 1200);
  Build(last);
  const BuildStats builds = engine_->Stats().builds;
  EXPECT_EQ(builds.segments_given + builds.labels_unused, kept) << story;
  EXPECT_EQ(builds.labels_left_aside, 0u);
}

// With a builder that stands still: what uses labels depends on calls, never on the builder.
class GatedLabelsTest : public LabelsTest {
 protected:
  GatedLabelsTest() {
    StartEngine({.epoch = 3, .build_threads = 1, .compute_threads = 2}, uint64_t{256} << 20,
                nullptr, CreateGatedBackend(gate_));
  }
  ~GatedLabelsTest() override { gate_->Open(); }

  const std::shared_ptr<BuildGate> gate_ = std::make_shared<BuildGate>();
};

TEST_F(GatedLabelsTest, TooLateIsWhenTheCutIsPlannedAndNotWhenItIsBuilt) {
  const TokenData data(shape(), 3000, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 2048 + 127);
  ASSERT_TRUE(gate_->WaitForWaiter());
  EXPECT_EQ(Give(sequence, 0, {DealtLabels(4, 1020, 64), DealtLabels(1024, 1024, 64)}), 1u);
  Insert(sequence, data, 2048 + 127, 1);
  EXPECT_EQ(Give(sequence, 0, {DealtLabels(1024, 1024, 64)}), 0u);
  gate_->Open();
  WaitIdle(sequence);
  EXPECT_THAT(Segments(sequence, 0), ElementsAre("4+1020 own", "1024+1024 given"));
  EXPECT_THAT(Segments(sequence, 1), ElementsAre("4+1020 own", "1024+1024 own"));
}

// A child shares what its parent has planned, labels included, however far the parent's builder is.
TEST_F(GatedLabelsTest, AForkUsesItsParentsLabels) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  const SequenceRef parent = Create(spec_);
  GiveAll(parent, 3000);
  Insert(parent, data, 0, 3000);
  ASSERT_TRUE(gate_->WaitForWaiter());
  const auto fork = engine_->ForkSequence(kTenant, kOwner, parent, 0, 0, "");
  ASSERT_TRUE(fork.ok()) << fork.status();
  const auto shorter = engine_->ForkSequence(kTenant, kOwner, parent, 2048 + 63, 0, "");
  ASSERT_TRUE(shorter.ok()) << shorter.status();
  gate_->Open();
  const SequenceRef child = {fork->id, fork->generation};
  const SequenceRef cut = {shorter->id, shorter->generation};
  Build(parent);
  Build(child);
  Insert(cut, data, 2048 + 63, 3000 - 2048 - 63);
  Build(cut);
  EXPECT_THAT(Segments(parent), ElementsAre("4+1020 given", "1024+1024 given", "2048+888 given"));
  EXPECT_EQ(Segments(child), Segments(parent));
  EXPECT_EQ(Fingerprint(child, seed), Fingerprint(parent, seed));
  EXPECT_THAT(Segments(cut), ElementsAre("4+1020 given", "1024+1024 own", "2048+888 own"));
  EXPECT_EQ(engine_->Stats().builds.labels_unused, 0u);
}

TEST_F(GatedLabelsTest, ATruncatedJobTakesItsLabelsAlong) {
  const TokenData data(shape(), 3000, FreshSeed());
  SequenceRef sequence = Create(spec_);
  GiveAll(sequence, 3000);
  Insert(sequence, data, 0, 3000);
  ASSERT_TRUE(gate_->WaitForWaiter());
  const auto truncated = engine_->TruncateSequence(kTenant, sequence, 500);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  sequence.generation = truncated->generation;
  gate_->Open();
  Insert(sequence, data, 500, 2500);
  Build(sequence);
  EXPECT_THAT(Segments(sequence), ElementsAre("4+1020 own", "1024+1024 own", "2048+888 own"));
}

// A build that fails is tried again from the same labels.
TEST_F(GatedLabelsTest, AFailedBuildKeepsItsLabels) {
  const TokenData data(shape(), 1200, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  GiveAll(sequence, 1200);
  gate_->Fail(true);
  gate_->Open();
  Insert(sequence, data, 0, 1200);
  EXPECT_FALSE(engine_->BuildIndex(kTenant, sequence, nullptr).ok());
  EXPECT_EQ(engine_->Stats().builds.segments_given, 0u);
  gate_->Fail(false);
  Build(sequence);
  EXPECT_THAT(Segments(sequence), ElementsAre("4+1020 given"));
  EXPECT_EQ(engine_->Stats().builds.segments_given, 2u);
  EXPECT_EQ(engine_->Stats().builds.labels_unused, 0u);
}

// Truncated when all its heads are clustered but for one that is being: nothing of it is published.
TEST_F(GatedLabelsTest, OnlyWhatIsPublishedCounts) {
  spec_.shape.kv_head_count = 1;
  spec_.index.dense_layers = {1};
  const TokenData data(shape(), 1200, FreshSeed());
  SequenceRef sequence = Create(spec_);
  for (const bool given : {true, false}) {
    if (given) {
      ASSERT_EQ(Give(sequence, 0, {DealtLabels(4, 1020, 64)}), 1u);
    }
    Insert(sequence, data, StatusOf(sequence).token_count, 1200 - StatusOf(sequence).token_count);
    ASSERT_TRUE(gate_->WaitForWaiter());
    const auto truncated = engine_->TruncateSequence(kTenant, sequence, 500);
    ASSERT_TRUE(truncated.ok()) << truncated.status();
    sequence.generation = truncated->generation;
    gate_->Allow(1);
    WaitIdle(sequence);
    EXPECT_EQ(engine_->Stats().builds.segments_given, 0u);
    EXPECT_EQ(engine_->Stats().builds.segments_own, 0u);
  }
  gate_->Open();
  Insert(sequence, data, 500, 700);
  Build(sequence);  // Its thread is that of the others: they have let go.
  EXPECT_THAT(Segments(sequence), ElementsAre("4+1020 own"));
  const BuildStats builds = engine_->Stats().builds;
  EXPECT_EQ(builds.segments_given, 0u);
  EXPECT_EQ(builds.segments_own, 1u);
  EXPECT_EQ(builds.labels_unused, 1u);
}

TEST(HeldLabelsTest, TakesExactlyTheRangeAndForgetsWhatIsPast) {
  const auto counters = std::make_shared<BuildCounters>();
  HeldLabels held;
  const auto put = [&](TokenRange range) {
    held.Put(std::make_shared<const SegmentLabels>(
        GivenLabels{range, std::vector<uint16_t>(2 * range.size(), 3)}, counters));
  };
  const auto gone = [&] { return counters->labels_unused.load(); };
  put({4, 1024});
  put({1024, 2048});
  put({2048, 3072});
  EXPECT_EQ(held.Take({1024, 2000}), nullptr);
  EXPECT_EQ(gone(), 1u) << "the first one is past";
  const auto taken = held.Take({1024, 2048});
  ASSERT_NE(taken, nullptr);
  EXPECT_EQ(taken->head(1).size(), 1024u);
  EXPECT_EQ(held.Take({1024, 2048}), nullptr) << "taken already";
  EXPECT_EQ(gone(), 1u);
  put({2000, 2049});
  EXPECT_EQ(gone(), 2u) << "the one that it overlaps";
  held.Truncate(2049 + 64);
  EXPECT_EQ(gone(), 2u);
  held.Truncate(2049 + 63);
  EXPECT_EQ(gone(), 3u);
  EXPECT_EQ(held.Take({2000, 2049}), nullptr);
}

}  // namespace
}  // namespace wavekv::testing
