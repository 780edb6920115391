// Tokens of a batch over regions that were written as the daemon writes them, against the float64
// oracle, on fresh random inputs.
#include "client/gpu/resident_batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gpu/kernels/device_array.h"
#include "tests/client/gpu/region_host.h"
#include "tests/gpu/kernels/device_test.h"
#include "tests/gpu/kernels/head_problem.h"

namespace wavekv::client {
namespace {

using gpu::DeviceArray;
using ::testing::HasSubstr;

constexpr uint32_t kLayers = 2, kKvHeads = 2, kGroup = 4, kDim = 128, kBatch = 3;
constexpr uint32_t kUnits = kLayers * kKvHeads;  // Of a sequence.
constexpr float kScale = 0.0883883f;
constexpr uint64_t kBufferBytes = 64 << 20;

ResidentModel Model() {
  return {.layer_count = kLayers,
          .kv_head_count = kKvHeads,
          .group_size = kGroup,
          .head_dim = kDim,
          .softmax_scale = kScale,
          .batch = kBatch,
          .max_tokens = 8192};
}

std::shared_ptr<const CudaDevice> TheDevice() {
  const auto driver = CudaDriver::Get().value();
  return CudaDevice::Open(driver, CudaDevice::Identify(*driver, 0).value(),
                          CudaDevice::Waiting::kAsItIs)
      .value();
}

// A sequence in the wave buffer, and what it holds.
struct Stored {
  std::vector<gpu::HeadProblem> heads;  // [layers, kv_heads]
  std::vector<uint64_t> ends;           // Likewise: of the ring.
  ResidentAttachment attachment;
  resident::ResidentHeader header;

  uint64_t unit_offset(uint32_t unit) const {
    return attachment.region_offset + header.units_offset + unit * header.unit.unit_bytes;
  }
  uint64_t state_offset(uint32_t unit) const {
    return attachment.region_offset + header.states_offset + unit * sizeof(gpu::HeadState);
  }
};

class ResidentBatchTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!gpu::HasDevice()) GTEST_SKIP() << gpu::kNoDevice;
    const uint64_t seed = gpu::TestSeed();
    random_.seed(seed);
    RecordProperty("seed", std::to_string(seed));
    host_ = std::make_unique<RegionHost>(TheDevice(), kBufferBytes);
    auto batch = ResidentBatch::Create(Model());
    ASSERT_TRUE(batch.ok()) << batch.status();
    batch_ = *std::move(batch);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    const size_t rows = size_t{kBatch} * kKvHeads * kGroup;
    queries_ = DeviceArray<uint16_t>::Make(kLayers * rows * kDim).value();
    out_ = DeviceArray<uint16_t>::Make(kLayers * rows * kDim).value();
    lse_ = DeviceArray<float>::Make(kLayers * rows).value();
    keys_ = DeviceArray<uint16_t>::Make(size_t{kLayers} * kBatch * kKvHeads * kDim).value();
    values_ = DeviceArray<uint16_t>::Make(keys_.size()).value();
  }
  void TearDown() override {
    batch_.reset();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  Stored Store(uint64_t id, const gpu::HeadSpec& spec) {
    Stored stored;
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      stored.heads.push_back(gpu::MakeHead(random_, gpu::Element::kBF16, kDim, spec));
      stored.ends.push_back(spec.steady_first + spec.steady);
    }
    gpu::RegionImage image(random_,
                           {.sequence_id = id, .layer_count = kLayers, .kv_head_count = kKvHeads},
                           stored.heads);
    stored.header = image.header();
    stored.attachment = host_->Attach(image, ShapeOf(image, kGroup, kScale));
    return stored;
  }

  // Opens it, and makes it the entry's.
  void Set(uint32_t entry, const Stored& stored) {
    auto open = batch_->Open(stored.attachment);
    ASSERT_TRUE(open.ok()) << open.status();
    const absl::Status set = batch_->SetSequence(entry, *open, stream_);
    ASSERT_TRUE(set.ok()) << set;
  }
  std::vector<uint16_t> RandomBits(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> bits(count);
    for (uint16_t& x : bits) x = gpu::ToBits(gpu::Element::kBF16, normal(random_));
    return bits;
  }

  // New queries and rows over poisoned outputs; the rows go into what `entries` (null: empty) hold.
  void MakeInputs(const std::vector<Stored*>& entries) {
    queries_host_ = RandomBits(queries_.size());
    const std::vector<uint16_t> keys = RandomBits(keys_.size()), values = RandomBits(keys_.size());
    ASSERT_TRUE(queries_.Upload(queries_host_).ok());
    ASSERT_TRUE(keys_.Upload(keys).ok());
    ASSERT_TRUE(values_.Upload(values).ok());
    ASSERT_TRUE(out_.Upload(std::vector<uint16_t>(out_.size(), 0x7fff)).ok());
    ASSERT_TRUE(lse_.Upload(std::vector<float>(lse_.size(), std::nanf(""))).ok());
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      for (uint32_t e = 0; e < kBatch; ++e) {
        if (entries[e] == nullptr) continue;
        const size_t row = RowOf(e, unit) * kDim;
        gpu::AppendToRing(&entries[e]->heads[unit], entries[e]->ends[unit]++,
                          {keys.begin() + row, keys.begin() + row + kDim},
                          {values.begin() + row, values.begin() + row + kDim});
      }
    }
  }
  // Of [layers, batch, kv_heads].
  static size_t RowOf(uint32_t entry, uint32_t unit) {
    return (size_t{unit / kKvHeads} * kBatch + entry) * kKvHeads + unit % kKvHeads;
  }

  absl::Status Launch() {
    absl::Status status = batch_->BeginToken(stream_);
    for (uint32_t layer = 0; layer < kLayers && status.ok(); ++layer) {
      const size_t rows = size_t{layer} * kBatch * kKvHeads;
      status = batch_->Attend(layer,
                              {.queries = queries_.data() + rows * kGroup * kDim,
                               .new_keys = keys_.data() + rows * kDim,
                               .new_values = values_.data() + rows * kDim,
                               .out = out_.data() + rows * kGroup * kDim,
                               .lse = lse_.data() + rows * kGroup},
                              stream_);
    }
    return status;
  }
  // A token by calls.
  void RunToken() {
    const absl::Status reserved = batch_->ReserveToken();
    ASSERT_TRUE(reserved.ok()) << reserved;
    const absl::Status launched = Launch();
    ASSERT_TRUE(launched.ok()) << launched;
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }

  // The clusters that the last step of a unit retrieved, as its log says.
  std::vector<uint32_t> Retrieved(const Stored& stored, uint32_t unit, uint64_t log_begin) const {
    const gpu::HeadProblem& head = stored.heads[unit];
    const resident::UnitLayout& layout = stored.header.unit;
    const auto state = host_->Read<gpu::HeadState>(stored.state_offset(unit));
    std::set<uint32_t> blocks;
    for (uint64_t i = log_begin; i < state.log_end; ++i) {
      const auto use = host_->Read<gpu::BlockUse>(stored.unit_offset(unit) + layout.log_offset +
                                                  i % layout.log_capacity * sizeof(gpu::BlockUse));
      blocks.insert(use.block & ~gpu::kMissBit);
    }
    std::vector<uint32_t> clusters;
    for (uint32_t c = 0; c < head.cluster_count(); ++c) {
      if (head.sizes[c] > 0 && blocks.count(head.first_block[c]) == 1) clusters.push_back(c);
    }
    return clusters;
  }

  void ExpectNothing(uint32_t entry) const {
    const std::vector<uint16_t> out = out_.Download().value();
    const std::vector<float> lse = lse_.Download().value();
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      for (uint32_t g = 0; g < kGroup; ++g) {
        const size_t row = RowOf(entry, unit) * kGroup + g;
        EXPECT_EQ(lse[row], -HUGE_VALF);
        for (uint32_t d = 0; d < kDim; ++d) EXPECT_EQ(out[row * kDim + d] & 0x7fff, 0);
      }
    }
  }

  void ExpectOracle(uint32_t entry, const Stored& stored, const std::vector<uint64_t>& logs) const {
    const std::vector<uint16_t> out = out_.Download().value();
    const std::vector<float> lse = lse_.Download().value();
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      SCOPED_TRACE("entry " + std::to_string(entry) + " unit " + std::to_string(unit));
      const gpu::HeadProblem& head = stored.heads[unit];
      const size_t first = RowOf(entry, unit) * kGroup;
      std::vector<double> queries;
      for (size_t i = 0; i < size_t{kGroup} * kDim; ++i) {
        queries.push_back(gpu::FromBits(gpu::Element::kBF16, queries_host_[first * kDim + i]));
      }
      const std::vector<uint32_t> retrieved = Retrieved(stored, unit, logs[unit]);
      ASSERT_EQ(retrieved.size(), std::min(head.spec.retrieve, head.real_clusters));
      const auto expected =
          gpu::StepOracle(head, queries, kGroup, kScale, stored.ends[unit]).Attend(retrieved);
      for (uint32_t g = 0; g < kGroup; ++g) {
        double error = 0, norm = 0;
        for (uint32_t d = 0; d < kDim; ++d) {
          const double reference = expected.out[g * kDim + d];
          error += std::pow(
              gpu::FromBits(gpu::Element::kBF16, out[(first + g) * kDim + d]) - reference, 2);
          norm += reference * reference;
        }
        // As GivesWhatTheOracleGives of the step's own test.
        EXPECT_LE(std::sqrt(error), 5e-3 * std::sqrt(norm)) << "head " << g;
        EXPECT_NEAR(lse[first + g], expected.lse[g], 2e-3) << "head " << g;
      }
      const auto state = host_->Read<gpu::HeadState>(stored.state_offset(unit));
      EXPECT_EQ(state.appended, stored.ends[unit]);
      EXPECT_EQ(state.started, state.completed_epoch);
      EXPECT_EQ(state.appended_settled, state.appended);
      EXPECT_EQ(state.log_settled, state.log_end);
    }
  }

  std::vector<uint64_t> LogEnds(const Stored& stored) const {
    std::vector<uint64_t> ends;
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      ends.push_back(host_->Read<gpu::HeadState>(stored.state_offset(unit)).log_end);
    }
    return ends;
  }

  std::mt19937_64 random_;
  std::unique_ptr<RegionHost> host_;
  std::unique_ptr<ResidentBatch> batch_;
  cudaStream_t stream_ = nullptr;
  std::vector<uint16_t> queries_host_;
  DeviceArray<uint16_t> queries_, keys_, values_, out_;
  DeviceArray<float> lse_;
};

struct Row {
  std::string name;
  std::vector<uint32_t> segment_tokens;
  uint32_t retrieve = 8;
  uint32_t stale_clusters = 0;
  bool graph = false;
};
void PrintTo(const Row& row, std::ostream* os) { *os << row.name; }

class ResidentTokensTest : public ResidentBatchTest, public testing::WithParamInterface<Row> {};

TEST_P(ResidentTokensTest, AreWhatTheOracleGives) {
  const Row& row = GetParam();
  gpu::HeadSpec spec;
  spec.segment_tokens = row.segment_tokens;
  spec.retrieve = row.retrieve;
  spec.stale_clusters = row.stale_clusters;
  Stored first = Store(11, spec);
  spec.steady_first = 203;  // In the middle of a block.
  Stored last = Store(12, spec);
  const std::vector<Stored*> entries = {&first, nullptr, &last};
  Set(0, first);
  Set(2, last);
  if (HasFatalFailure()) return;
  EXPECT_EQ(host_->redeemed(), 1);
  EXPECT_EQ(batch_->OutcomeOf(0), ResidentOutcome::kPending);
  EXPECT_EQ(batch_->OutcomeOf(1), ResidentOutcome::kEmpty);

  cudaGraphExec_t graph = nullptr;
  if (row.graph) {
    cudaGraph_t captured;
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    ASSERT_TRUE(Launch().ok());
    ASSERT_EQ(cudaStreamEndCapture(stream_, &captured), cudaSuccess);
    ASSERT_EQ(cudaGraphInstantiate(&graph, captured, 0), cudaSuccess);
    ASSERT_EQ(cudaGraphDestroy(captured), cudaSuccess);
  }
  // Later tokens find in the cache what the earlier ones fetched.
  for (int token = 0; token < 4 && !HasFailure(); ++token) {
    SCOPED_TRACE("token " + std::to_string(token));
    MakeInputs(entries);
    const std::vector<uint64_t> logs[] = {LogEnds(first), {}, LogEnds(last)};
    if (row.graph) {
      ASSERT_TRUE(batch_->ReserveToken().ok());
      ASSERT_EQ(cudaGraphLaunch(graph, stream_), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    } else {
      RunToken();
    }
    for (uint32_t e = 0; e < kBatch; ++e) {
      EXPECT_EQ(batch_->OutcomeOf(e),
                entries[e] == nullptr ? ResidentOutcome::kEmpty : ResidentOutcome::kAttending);
      if (entries[e] == nullptr) {
        ExpectNothing(e);
      } else {
        ExpectOracle(e, *entries[e], logs[e]);
        EXPECT_EQ(batch_->TokensOf(e), entries[e]->ends[0]);
      }
    }
  }
  if (row.graph) {
    ASSERT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Rows, ResidentTokensTest,
    testing::Values(
        Row{.name = "Segments", .segment_tokens = {2000, 300, 17}},
        Row{.name = "Captured", .segment_tokens = {2000, 300}, .graph = true},
        Row{.name = "Holes", .segment_tokens = {900, 300}, .stale_clusters = 2 * gpu::kClusterPad},
        Row{.name = "NothingClustered", .segment_tokens = {}, .retrieve = 0},
        Row{.name = "AllRetrieved", .segment_tokens = {400}, .retrieve = 200}),
    [](const auto& info) { return info.param.name; });

TEST_F(ResidentBatchTest, ARegionThatIsClosedIsAttendedToNoMore) {
  gpu::HeadSpec spec;
  spec.segment_tokens = {500};
  Stored stored = Store(11, spec);
  Set(1, stored);
  if (HasFatalFailure()) return;
  MakeInputs({nullptr, &stored, nullptr});
  RunToken();
  EXPECT_EQ(batch_->OutcomeOf(1), ResidentOutcome::kAttending);
  host_->Write(stored.attachment.region_offset + offsetof(resident::ResidentHeader, state),
               resident::kRegionClosed);
  MakeInputs({nullptr, nullptr, nullptr});
  RunToken();
  EXPECT_EQ(batch_->OutcomeOf(1), ResidentOutcome::kClosed);
  ExpectNothing(1);
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    // The daemon waits for no step, and nothing was appended.
    const auto state = host_->Read<gpu::HeadState>(stored.state_offset(unit));
    EXPECT_EQ(state.started, state.completed_epoch);
    EXPECT_EQ(state.appended, stored.ends[unit]);
  }
}

TEST_F(ResidentBatchTest, WhatIsMalformedIsAttendedToAsNothing) {
  gpu::HeadSpec spec;
  spec.segment_tokens = {500};
  const Stored damaged = Store(11, spec), large = Store(12, spec);
  Set(0, damaged);
  Set(1, large);
  if (HasFatalFailure()) return;
  host_->Write(damaged.attachment.region_offset, uint64_t{0});
  // More clusters than there is room for, in one unit of its four.
  const uint64_t published = large.unit_offset(kUnits - 1) + large.header.unit.published_offset +
                             sizeof(resident::PublishedHead);
  host_->Write(published + offsetof(resident::PublishedHead, cluster_count),
               large.header.unit.cluster_capacity + gpu::kClusterPad);
  MakeInputs({nullptr, nullptr, nullptr});
  RunToken();
  EXPECT_EQ(batch_->OutcomeOf(0), ResidentOutcome::kMalformed);
  EXPECT_EQ(batch_->OutcomeOf(1), ResidentOutcome::kMalformed);
  ExpectNothing(0);
}

TEST_F(ResidentBatchTest, GarbageInARegionHarmsNoOther) {
  gpu::HeadSpec spec;
  spec.segment_tokens = {2000, 300};
  Stored broken = Store(11, spec), sound = Store(12, spec);
  Set(0, broken);
  Set(2, sound);
  if (HasFatalFailure()) return;
  const resident::UnitLayout& layout = broken.header.unit;
  const uint64_t described = layout.segments_offset,
                 described_end =
                     described + layout.segment_capacity * sizeof(resident::SegmentEntry);
  for (int token = 0; token < 8 && !HasFailure(); ++token) {
    SCOPED_TRACE("token " + std::to_string(token));
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      // All but what says how much there is, and in every other unit where the rows lie.
      for (uint64_t at = layout.sizes_offset; at < layout.unit_bytes;) {
        const bool kept = unit % 2 == 0 && at == described;
        uint64_t end = at < described ? described : layout.unit_bytes;
        if (at == described) end = described_end;
        std::vector<std::byte> garbage(end - at);
        for (std::byte& x : garbage) x = static_cast<std::byte>(random_());
        if (!kept) host_->WriteBytes(broken.unit_offset(unit) + at, std::move(garbage));
        at = end;
      }
    }
    MakeInputs({nullptr, nullptr, &sound});
    const std::vector<uint64_t> logs = LogEnds(sound);
    RunToken();
    EXPECT_EQ(batch_->OutcomeOf(2), ResidentOutcome::kAttending);
    ExpectOracle(2, sound, logs);
  }
}

TEST_F(ResidentBatchTest, EntriesChangeBetweenTokens) {
  gpu::HeadSpec spec;
  spec.segment_tokens = {500};
  Stored a = Store(11, spec), b = Store(12, spec);
  auto open_a = batch_->Open(a.attachment), open_b = batch_->Open(b.attachment);
  ASSERT_TRUE(open_a.ok() && open_b.ok()) << open_a.status() << open_b.status();
  // Which of them each entry is, token by token.
  const std::vector<std::vector<Stored*>> tokens = {
      {&a, &b, nullptr}, {nullptr, &b, &a}, {&b, nullptr, &a}, {nullptr, nullptr, nullptr}};
  for (const std::vector<Stored*>& entries : tokens) {
    for (uint32_t e = 0; e < kBatch; ++e) {
      ASSERT_TRUE(batch_->SetSequence(e, nullptr, stream_).ok());
    }
    for (uint32_t e = 0; e < kBatch; ++e) {
      if (entries[e] == nullptr) continue;
      const auto& open = entries[e] == &a ? *open_a : *open_b;
      ASSERT_TRUE(batch_->SetSequence(e, open, stream_).ok());
      EXPECT_TRUE(absl::IsFailedPrecondition(batch_->SetSequence((e + 1) % kBatch, open, stream_)));
    }
    MakeInputs(entries);
    const std::vector<uint64_t> logs_a = LogEnds(a), logs_b = LogEnds(b);
    RunToken();
    for (uint32_t e = 0; e < kBatch && !HasFailure(); ++e) {
      if (entries[e] == nullptr) {
        ExpectNothing(e);
      } else {
        ExpectOracle(e, *entries[e], entries[e] == &a ? logs_a : logs_b);
      }
    }
  }
}

TEST_F(ResidentBatchTest, AFullRingIsSaidBeforeATokenIsLost) {
  gpu::HeadSpec spec;
  spec.segment_tokens = {500};
  spec.steady_capacity = 64;
  spec.steady_first = 100;  // The ring begins with position 96.
  spec.steady = 58;
  Stored stored = Store(11, spec);
  Set(0, stored);
  if (HasFatalFailure()) return;
  EXPECT_EQ(batch_->RoomFor(0), 2u);
  for (int i = 0; i < 2; ++i) {
    MakeInputs({&stored, nullptr, nullptr});
    RunToken();
  }
  const absl::Status full = batch_->ReserveToken();
  EXPECT_TRUE(absl::IsUnavailable(full)) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("sequence 11"));
  batch_->NoteCovered(0, 110);
  EXPECT_EQ(batch_->RoomFor(0), 8u);
  EXPECT_TRUE(batch_->ReserveToken().ok());
  for (uint32_t unit = 0; unit < kUnits; ++unit) {
    EXPECT_EQ(host_->Read<gpu::HeadState>(stored.state_offset(unit)).overflows, 0u);
  }
}

TEST_F(ResidentBatchTest, WrongCallsAreRefused) {
  const ResidentTensors good = {.queries = queries_.data(),
                                .new_keys = keys_.data(),
                                .new_values = values_.data(),
                                .out = out_.data(),
                                .lse = lse_.data()};
  EXPECT_TRUE(absl::IsInvalidArgument(batch_->Attend(kLayers, good, stream_)));
  ResidentTensors bad = good;
  bad.new_values = nullptr;
  EXPECT_THAT(std::string(batch_->Attend(0, bad, stream_).message()), HasSubstr("new_values"));
  bad = good;
  bad.out = nullptr;
  EXPECT_THAT(std::string(batch_->Attend(0, bad, stream_).message()), HasSubstr("out is null"));
  bad = good;
  bad.queries = queries_.data() + 1;
  EXPECT_THAT(std::string(batch_->Attend(0, bad, stream_).message()), HasSubstr("multiple of 16"));
  EXPECT_TRUE(absl::IsInvalidArgument(batch_->SetSequence(kBatch, nullptr, stream_)));
  gpu::HeadSpec spec;
  Stored stored = Store(11, spec);
  const std::string uuid =
      std::exchange(stored.attachment.device_uuid, "GPU-00000000-0000-0000-0000-000000000000");
  const absl::Status other = batch_->Open(stored.attachment).status();
  stored.attachment.device_uuid = uuid;
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(std::string(other.message()), HasSubstr("cudaSetDevice"));
  stored.attachment.region_offset = stored.attachment.buffer_bytes;
  EXPECT_TRUE(absl::IsDataLoss(batch_->Open(stored.attachment).status()));
}

}  // namespace
}  // namespace wavekv::client
