// A sequence that is attached to a resident region: what steps append there is stored, what is
// built is shown, and it ends in every way without losing either.
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/engine/cut_plan.h"
#include "daemon/engine/resident_view.h"
#include "gmock/gmock.h"
#include "storage/base/shared_memory.h"
#include "tests/engine/engine_fixture.h"
#include "tests/engine/fake_stager.h"

namespace wavekv::testing {
namespace {

using ::testing::HasSubstr;

constexpr std::chrono::seconds kPatience(60);
constexpr std::chrono::milliseconds kGlance(10);

std::vector<std::byte> HeadRows(const TokenData& data, uint32_t layer, uint64_t position,
                                bool keys) {
  const ModelShape& shape = data.shape();
  std::vector<std::byte> rows;
  for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
    const std::byte* const row =
        keys ? data.Key(layer, position, head) : data.Value(layer, position, head);
    rows.insert(rows.end(), row, row + (keys ? shape.key_bytes() : shape.value_bytes()));
  }
  return rows;
}

class ResidentTest : public EngineTest {
 protected:
  ResidentTest() {
    EngineOptions options;
    options.epoch = 1;
    options.clock = &clock_;
    StartEngine(options, 512ull << 20, CreateFakeStager(buffer_));
  }

  absl::StatusOr<ResidentGrant> TryAttach(SequenceRef sequence, ClientId client = kOwner) {
    return engine_->AttachResident(kTenant, client, 1000, sequence, region_options_);
  }
  ResidentGrant Attach(SequenceRef sequence) {
    absl::StatusOr<ResidentGrant> grant = TryAttach(sequence);
    EXPECT_TRUE(grant.ok()) << grant.status();
    return grant.ok() ? *std::move(grant) : ResidentGrant();
  }
  std::shared_ptr<FakeRegion> RegionOf(SequenceRef sequence) {
    return buffer_->resident(sequence.id);
  }
  // A step appends token `position` of the data to one layer, on the device.
  void Step(SequenceRef sequence, const TokenData& data, uint32_t layer, uint64_t position) {
    ASSERT_EQ(RegionOf(sequence)->layer(layer).token_count, position);
    RegionOf(sequence)->Append(layer, HeadRows(data, layer, position, true),
                               HeadRows(data, layer, position, false));
  }
  ResidentState State(SequenceRef sequence) {
    const auto state = engine_->ResidentStatus(kTenant, sequence, 0, {});
    EXPECT_TRUE(state.ok()) << state.status();
    return state.ok() ? *state : ResidentState();
  }
  // Looks at the state until it is as wanted, with a bound.
  ResidentState WaitFor(SequenceRef sequence,
                        const std::function<bool(const ResidentState&)>& wanted) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    for (;;) {
      const auto state = engine_->ResidentStatus(kTenant, sequence, UINT64_MAX, kGlance);
      EXPECT_TRUE(state.ok()) << state.status();
      if (!state.ok()) return ResidentState();
      if (wanted(*state)) return *state;
      EXPECT_LT(std::chrono::steady_clock::now(), deadline) << "gave up waiting";
      if (std::chrono::steady_clock::now() >= deadline) return *state;
    }
  }
  void WaitStored(SequenceRef sequence, uint64_t token_count) {
    WaitFor(sequence, [&](const ResidentState& state) { return state.token_count == token_count; });
  }
  absl::Status WaitClosed(SequenceRef sequence) {
    return WaitFor(sequence, [](const ResidentState& state) { return !state.attached.ok(); })
        .attached;
  }
  // Appends tokens [begin, end) as an SDK does: a token goes to every layer, in an order of its
  // own, and no step is submitted that the ring has no room for.
  void StepUpTo(SequenceRef sequence, const TokenData& data, uint64_t begin, uint64_t end) {
    uint64_t steady_first = State(sequence).steady_first;
    for (uint64_t position = begin; position < end; ++position) {
      while (position - steady_first >= region_options_.ring_rows) {
        const auto state = engine_->ResidentStatus(kTenant, sequence, steady_first, kPatience);
        ASSERT_TRUE(state.ok()) << state.status();
        ASSERT_TRUE(state->attached.ok()) << state->attached;
        ASSERT_GT(state->steady_first, steady_first) << "the ring stays full";
        steady_first = state->steady_first;
      }
      for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
        Step(sequence, data, layer, position);
      }
    }
  }

  const std::shared_ptr<FakeBuffer> buffer_ = std::make_shared<FakeBuffer>();
  ResidentOptions region_options_ = {.cache_ratio = 0.05, .ring_rows = 512};
};

// A child that does nothing until it is killed.
class Child {
 public:
  Child() : pid_(::fork()) {
    if (pid_ == 0) {
      for (;;) ::pause();
    }
  }
  ~Child() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  pid_t pid() const { return pid_; }
  UniqueFd Descriptor() const {
    return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  }

 private:
  pid_t pid_;
};

TEST_F(ResidentTest, StoresWhatStepsAppendAndShowsWhatIsBuilt) {
  const uint64_t seed = FreshSeed();
  constexpr uint64_t kInserted = 1500;
  constexpr uint64_t kEnd = 3700;
  const TokenData data(shape(), kEnd, seed);
  const SequenceRef sequence = Filled(data, kInserted);
  const ResidentGrant grant = Attach(sequence);
  EXPECT_EQ(grant.sequence.token_count, kInserted);
  EXPECT_EQ(grant.place.region_offset, 4096u);
  EXPECT_EQ(grant.ring_rows, 512u);
  EXPECT_EQ(grant.buffer.ticket, "uid:1000/1000");
  StepUpTo(sequence, data, kInserted, kEnd);
  WaitStored(sequence, kEnd);
  WaitIdle(sequence);
  const uint64_t clustered = StatusOf(sequence).clustered_tokens + kSinkTokens;
  const ResidentState shown = WaitFor(
      sequence, [&](const ResidentState& state) { return state.steady_first == clustered; });
  EXPECT_TRUE(shown.attached.ok()) << shown.attached;
  EXPECT_GT(shown.counters.miss_blocks, 0u) << "publications, in a fake region";
  EXPECT_EQ(engine_->Stats().residents.attached, 1u);
  EXPECT_GT(engine_->Stats().residents.rounds.count, 0u);
  EXPECT_EQ(RegionOf(sequence)->complaints(), "");
  EXPECT_EQ(RegionOf(sequence)->layer(0).loads, 1u);

  // Bit for bit what a sequence holds that has got the same by Insert.
  const SequenceRef twin = Filled(data, kInserted);
  Insert(twin, data, kInserted, kEnd - kInserted);
  WaitIdle(twin);
  EXPECT_TRUE(Fingerprint(sequence, seed) == Fingerprint(twin, seed));
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const AttendOutcome exact = Attend(sequence, 1, queries, /*exact=*/true);
  ASSERT_TRUE(exact.status.ok()) << exact.status;
  EXPECT_LT(RelativeError(shape(), exact.out, ExactOracle(data, 1, kEnd, queries).out), 1e-4);

  const auto detached = engine_->DetachResident(kTenant, kOwner, sequence);
  ASSERT_TRUE(detached.ok()) << detached.status();
  EXPECT_EQ(detached->counters.miss_blocks, shown.counters.miss_blocks);
  EXPECT_EQ(engine_->Stats().residents.attached, 0u);
  EXPECT_EQ(engine_->Stats().residents.counters.miss_blocks, shown.counters.miss_blocks);
  Insert(sequence, data, 0, 10);  // A client's to write again: the same bytes.
}

TEST_F(ResidentTest, WindowsHoldTheRowsOfSegmentsInheritedOnesToo) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  const SequenceRef parent = Filled(data, 1500);
  const auto forked = engine_->ForkSequence(kTenant, kOwner, parent, 0, 0, "child");
  ASSERT_TRUE(forked.ok()) << forked.status();
  const SequenceRef child{forked->id, forked->generation};
  const ResidentGrant grant = Attach(child);
  ASSERT_EQ(grant.windows.size(), 2u) << "its own, and its parent's";
  // The parent goes; what the child shows stays.
  ASSERT_TRUE(engine_->DropSequence(kTenant, parent).ok());
  StepUpTo(child, data, 1500, 3000);
  WaitStored(child, 3000);
  WaitIdle(child);
  const uint64_t clustered = StatusOf(child).clustered_tokens + kSinkTokens;
  WaitFor(child, [&](const ResidentState& state) { return state.steady_first == clustered; });
  EXPECT_EQ(RegionOf(child)->complaints(), "");

  std::vector<Mapping> windows;
  for (const auto& arena : grant.windows) {
    auto mapped = Mapping::Map(arena->fd(), arena->arena_bytes(), Mapping::kReadOnly);
    ASSERT_TRUE(mapped.ok()) << mapped.status();
    windows.push_back(*std::move(mapped));
  }
  std::vector<int> segments_in(windows.size(), 0);
  for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
    const ResidentLayer shown = RegionOf(child)->layer(layer).shown;
    // Of the head that has most; so few that what replaces the sketch decides.
    uint32_t clusters = 0;
    for (const auto& head : shown.heads) {
      uint32_t of_head = 0;
      for (const ResidentSegment& segment : head) of_head += segment.head->cluster_count;
      clusters = std::max(clusters, of_head);
    }
    ASSERT_LT(clusters, 128 / 0.014);
    EXPECT_EQ(shown.retrieve_count, std::min(clusters, 128u));
    for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
      for (const ResidentSegment& segment : shown.heads[head]) {
        ASSERT_LT(segment.window, windows.size());
        ++segments_in[segment.window];
        for (uint32_t row = 0; row < segment.head->token_count; ++row) {
          const uint64_t position = segment.head->first_position + segment.head->row_to_offset[row];
          ASSERT_EQ(0, std::memcmp(windows[segment.window].data() + segment.keys_offset +
                                       row * shape().key_bytes(),
                                   data.Key(layer, position, head), shape().key_bytes()));
          ASSERT_EQ(0, std::memcmp(windows[segment.window].data() + segment.values_offset +
                                       row * shape().value_bytes(),
                                   data.Value(layer, position, head), shape().value_bytes()));
        }
      }
    }
  }
  EXPECT_GT(segments_in[0], 0);
  EXPECT_GT(segments_in[1], 0);
}

TEST_F(ResidentTest, ASegmentThatLiesInNoWindowIsNamed) {
  SegmentHead head;
  head.first_position = kSinkTokens;
  head.token_count = head.cluster_count = 1;
  LayerSnapshot snapshot;
  snapshot.shape = &shape();
  snapshot.token_count = kSinkTokens + 1;
  snapshot.chunks = std::make_shared<const ChunkList>();
  snapshot.version = std::make_shared<const LayerVersion>(
      1,
      SegmentList{std::make_shared<const Segment>(
          TokenRange{kSinkTokens, kSinkTokens + 1},
          std::vector<SegmentHead>(shape().kv_head_count, head), shape().token_bytes(),
          std::make_shared<std::atomic<uint64_t>>(0))},
      shape().kv_head_count);
  const absl::Status status = ShowLayer(snapshot, {}, ZoneBudget(), true).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("tokens 4 to 4 lie in memory"));
}

TEST_F(ResidentTest, WritesTakeADrainedStreamAndAreShown) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 2000, seed);
  const SequenceRef sequence = Filled(data, 1500);
  Attach(sequence);
  StepUpTo(sequence, data, 1500, 1530);
  RegionOf(sequence)->SetStepping(true);
  const auto refused = TryInsert(sequence, data, 1530, 10);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("under way"));
  EXPECT_EQ(engine_->TruncateSequence(kTenant, sequence, 1500).status().code(),
            absl::StatusCode::kFailedPrecondition);

  RegionOf(sequence)->SetStepping(false);
  Insert(sequence, data, 1530, 10);  // What was appended before is stored first.
  EXPECT_EQ(RegionOf(sequence)->layer(1).loads, 2u);
  EXPECT_EQ(RegionOf(sequence)->layer(1).token_count, 1540u);
  StepUpTo(sequence, data, 1540, 1550);

  const auto truncated = engine_->TruncateSequence(kTenant, sequence, 1100);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  const SequenceRef again{sequence.id, truncated->generation};
  EXPECT_EQ(RegionOf(sequence)->layer(0).token_count, 1100u);
  EXPECT_EQ(State(again).generation, truncated->generation);
  EXPECT_EQ(engine_->ResidentStatus(kTenant, sequence, 0, {}).status().code(),
            absl::StatusCode::kFailedPrecondition)
      << "of an earlier generation";
  TokenData other(shape(), 2000, seed + 1);
  StepUpTo(again, other, 1100, 1900);
  WaitStored(again, 1900);
  WaitIdle(again);
  EXPECT_EQ(RegionOf(sequence)->complaints(), "");

  const SequenceRef twin = Filled(data, 1500);
  Insert(twin, data, 1500, 50);
  WaitIdle(twin);
  const auto twin_truncated = engine_->TruncateSequence(kTenant, twin, 1100);
  ASSERT_TRUE(twin_truncated.ok());
  const SequenceRef twin_again{twin.id, twin_truncated->generation};
  Insert(twin_again, other, 1100, 800);
  WaitIdle(twin_again);
  EXPECT_TRUE(Fingerprint(again, seed) == Fingerprint(twin_again, seed));

  EXPECT_EQ(engine_->TruncateSequence(kTenant, again, 3).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(State(again).attached.ok());
}

TEST_F(ResidentTest, AWriteThatCannotBeShownEndsTheAttachment) {
  const TokenData data(shape(), 1600, FreshSeed());
  const SequenceRef sequence = Filled(data, 1500);
  Attach(sequence);
  RegionOf(sequence)->SetLoadStatus(absl::FailedPreconditionError("more than the ring holds"));
  Insert(sequence, data, 1500, 100);
  const absl::Status attached = State(sequence).attached;
  EXPECT_EQ(attached.code(), absl::StatusCode::kFailedPrecondition) << attached;
  EXPECT_THAT(std::string(attached.message()), HasSubstr("cannot be shown"));
  EXPECT_EQ(StatusOf(sequence).token_count, 1600u);
  Attach(sequence);
  EXPECT_TRUE(State(sequence).attached.ok());
}

TEST_F(ResidentTest, AVersionWithoutNumbersIsTriedAgain) {
  const TokenData data(shape(), 4000, FreshSeed());
  const SequenceRef sequence = Filled(data, 1500);
  Attach(sequence);
  const auto region = RegionOf(sequence);
  const uint64_t before = State(sequence).steady_first;
  region->SetPublishStatus(absl::ResourceExhaustedError("no free numbers"));
  StepUpTo(sequence, data, 1500, 1900);
  WaitStored(sequence, 1900);
  WaitIdle(sequence);
  EXPECT_TRUE(State(sequence).attached.ok()) << State(sequence).attached;
  EXPECT_EQ(State(sequence).steady_first, before);
  region->SetPublishStatus(absl::OkStatus());
  const auto state = engine_->ResidentStatus(kTenant, sequence, before, std::chrono::seconds(20));
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_TRUE(state->attached.ok()) << state->attached;
  EXPECT_GT(state->steady_first, before);
  EXPECT_EQ(region->complaints(), "");
}

TEST_F(ResidentTest, OnlyStepsAppendAndReadsGoOn) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1600, seed);
  const SequenceRef sequence = Filled(data, 1500);
  Attach(sequence);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const AttendOutcome refused = Decode(sequence, data, 0, 1500, queries);
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kFailedPrecondition) << refused.status;
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr("detach"));
  const auto recorder = engine_->Record(kTenant, sequence, {});
  EXPECT_EQ(recorder.status().code(), absl::StatusCode::kFailedPrecondition) << recorder.status();
  const AttendOutcome exact = Attend(sequence, 0, queries, /*exact=*/true);
  ASSERT_TRUE(exact.status.ok()) << exact.status;
  EXPECT_LT(RelativeError(shape(), exact.out, ExactOracle(data, 0, 1500, queries).out), 1e-4);
}

TEST_F(ResidentTest, APublicationWaitsForSteps) {
  const TokenData data(shape(), 2200, FreshSeed());
  const SequenceRef sequence = Filled(data, 1500);
  const uint64_t before = StatusOf(sequence).clustered_tokens;
  Attach(sequence);
  RegionOf(sequence)->SetBusy(true);
  StepUpTo(sequence, data, 1500, 1900);
  WaitStored(sequence, 1900);
  WaitIdle(sequence);
  ASSERT_GT(StatusOf(sequence).clustered_tokens, before);
  EXPECT_EQ(State(sequence).steady_first, before + kSinkTokens);
  RegionOf(sequence)->SetBusy(false);
  StepUpTo(sequence, data, 1900, 2200);
  const auto state = engine_->ResidentStatus(kTenant, sequence, before + kSinkTokens, kPatience);
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_GT(state->steady_first, before + kSinkTokens);
  EXPECT_EQ(RegionOf(sequence)->complaints(), "");
}

struct FailureCase {
  const char* what;
  std::function<void(FakeRegion*, TokenData*)> fail;  // Before tokens from 1,500 on are appended.
  absl::StatusCode code;
};

TEST_F(ResidentTest, WhatFailsEndsTheAttachmentAndNothingElse) {
  const uint64_t seed = FreshSeed();
  const std::vector<FailureCase> cases = {
      {"the buffer is lost",
       [](FakeRegion* region, TokenData*) {
         region->SetStatus(absl::UnavailableError("wavebufferd was restarted"));
       },
       absl::StatusCode::kUnavailable},
      {"an engine appends a NaN",
       [](FakeRegion*, TokenData* data) {
         data->SetKey(1, 1510, 1, std::vector<float>(data->shape().key_dim, NAN));
       },
       absl::StatusCode::kInvalidArgument},
  };
  for (const FailureCase& row : cases) {
    SCOPED_TRACE(row.what);
    TokenData data(shape(), 1520, seed);
    const TokenData good(shape(), 1520, seed);
    const SequenceRef sequence = Filled(data, 1500);
    const ResidentGrant grant = Attach(sequence);
    row.fail(RegionOf(sequence).get(), &data);
    for (uint64_t position = 1500; position < 1520; ++position) {
      for (uint32_t layer = 0; layer < 2; ++layer) Step(sequence, data, layer, position);
    }
    const absl::Status why = WaitClosed(sequence);
    EXPECT_EQ(why.code(), row.code) << why;
    EXPECT_NE(RegionOf(sequence)->engine_is_gone(), nullptr);
    EXPECT_FALSE(grant.process->Bind(1, UniqueFd()).ok()) << "no window any more";
    EXPECT_EQ(engine_->DetachResident(kTenant, kOwner, sequence).status().code(),
              absl::StatusCode::kFailedPrecondition);
    // The client goes on from what is stored, and may attach again.
    const uint64_t stored = StatusOf(sequence).token_count;
    Insert(sequence, good, stored, 1520 - stored);
    Attach(sequence);
    EXPECT_TRUE(State(sequence).attached.ok());
    EXPECT_EQ(RegionOf(sequence)->layer(0).token_count, 1520u);
    ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  }
}

TEST_F(ResidentTest, EndsWithItsSequenceItsLeaseOrItsProcess) {
  const TokenData data(shape(), 1540, FreshSeed());
  {
    SCOPED_TRACE("dropped");
    const SequenceRef sequence = Filled(data, 1500);
    Attach(sequence);
    const auto region = RegionOf(sequence);
    ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
    ASSERT_NE(region->engine_is_gone(), nullptr);
    EXPECT_TRUE(region->engine_is_gone()()) << "nobody ever had a window";
    EXPECT_EQ(engine_->ResidentStatus(kTenant, sequence, 0, {}).status().code(),
              absl::StatusCode::kNotFound);
  }
  {
    SCOPED_TRACE("its lease ends, a process still has it");
    const SequenceRef sequence = Filled(data, 1500);
    ASSERT_TRUE(engine_->Pin(kTenant, sequence, true).ok());
    const ResidentGrant grant = Attach(sequence);
    Child child;
    ASSERT_TRUE(grant.process->Bind(child.pid(), child.Descriptor()).ok());
    StepUpTo(sequence, data, 1500, 1540);
    engine_->ReleaseOwner(kOwner);
    EXPECT_EQ(State(sequence).attached.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(StatusOf(sequence).token_count, 1540u) << "what was appended is kept";
    EXPECT_FALSE(RegionOf(sequence)->engine_is_gone()());
    child.Kill();
    EXPECT_TRUE(RegionOf(sequence)->engine_is_gone()());
    EXPECT_EQ(TryAttach(sequence).status().code(), absl::StatusCode::kFailedPrecondition)
        << "it is nobody's now";
    ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  }
  {
    SCOPED_TRACE("its process is killed");
    const SequenceRef sequence = Filled(data, 1500);
    const ResidentGrant grant = Attach(sequence);
    Child child;
    const Child stranger;
    ASSERT_TRUE(grant.process->Bind(child.pid(), child.Descriptor()).ok());
    ASSERT_TRUE(grant.process->Bind(child.pid(), child.Descriptor()).ok()) << "another window";
    EXPECT_EQ(grant.process->Bind(stranger.pid(), stranger.Descriptor()).code(),
              absl::StatusCode::kFailedPrecondition);
    StepUpTo(sequence, data, 1500, 1540);
    child.Kill();
    EXPECT_EQ(WaitClosed(sequence).code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(StatusOf(sequence).token_count, 1540u);
    Attach(sequence);
    EXPECT_TRUE(State(sequence).attached.ok());
  }
}

struct AttachRefusal {
  const char* what;
  std::function<void(SequenceSpec*)> spoil;
  uint64_t inserted = 1500;
  bool build = true;
  ClientId client = kOwner;
  uint32_t ring_rows = 512;
  absl::StatusCode code = absl::StatusCode::kFailedPrecondition;
  const char* text;
};

TEST_F(ResidentTest, Refusals) {
  const TokenData data(shape(), 1500, FreshSeed());
  const auto as_is = [](SequenceSpec*) {};
  const std::vector<AttachRefusal> cases = {
      {.what = "a dense layer",
       .spoil = [](SequenceSpec* spec) { spec->index.dense_layers = {1}; },
       .text = "layer 1 is dense"},
      {.what = "a coverage budget",
       .spoil = [](SequenceSpec* spec) { spec->index.budget.kind = BudgetKind::kCoverage; },
       .text = "no coverage budget"},
      {.what = "an error budget of one layer",
       .spoil =
           [](SequenceSpec* spec) {
             spec->index.layer_budgets = {{1, {.kind = BudgetKind::kError, .value = 0.1}}};
           },
       .text = "no error budget"},
      {.what = "estimating not all",
       .spoil = [](SequenceSpec* spec) { spec->index.budget.estimate_ratio = 0.5; },
       .text = "estimate_ratio"},
      {.what = "no index", .spoil = as_is, .build = false, .text = "BuildIndex"},
      {.what = "hardly a token", .spoil = as_is, .inserted = 3, .text = "3 tokens"},
      {.what = "another client's", .spoil = as_is, .client = ClientId(8), .text = "another client"},
      {.what = "a ring that the tokens to be cut fill",
       .spoil = as_is,
       .ring_rows = 384,
       .code = absl::StatusCode::kInvalidArgument,
       .text = "expected at least 385"},
  };
  for (const AttachRefusal& row : cases) {
    SCOPED_TRACE(row.what);
    SequenceSpec spec = spec_;
    row.spoil(&spec);
    const SequenceRef sequence = Create(spec);
    Insert(sequence, data, 0, row.inserted);
    if (row.build) Build(sequence);
    region_options_.ring_rows = row.ring_rows;
    const auto refused = TryAttach(sequence, row.client);
    EXPECT_EQ(refused.status().code(), row.code) << refused.status();
    EXPECT_THAT(std::string(refused.status().message()), HasSubstr(row.text));
    Insert(sequence, data, 0, row.inserted);  // A client's to write.
    ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  }
}

TEST_F(ResidentTest, RefusalsOfTheMoment) {
  const TokenData data(shape(), 1500, FreshSeed());
  const SequenceRef sequence = Filled(data, 1500);
  EXPECT_EQ(engine_->ResidentStatus(kTenant, sequence, 0, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine_->AttachResident("uid:2000", kOwner, 2000, sequence, {}).status().code(),
            absl::StatusCode::kNotFound);
  {
    const auto recorder = engine_->Record(kTenant, sequence, {});
    ASSERT_TRUE(recorder.ok()) << recorder.status();
    EXPECT_THAT(std::string(TryAttach(sequence).status().message()), HasSubstr("recorded"));
  }
  buffer_->SetStatus(absl::UnavailableError("wavebufferd is away"));
  EXPECT_EQ(TryAttach(sequence).status().code(), absl::StatusCode::kUnavailable);
  buffer_->SetStatus(absl::OkStatus());
  const ResidentGrant lost = Attach(sequence);  // Its reply is lost on the way.
  const ResidentGrant grant = Attach(sequence);
  EXPECT_FALSE(lost.process->Bind(1, UniqueFd()).ok());
  const Child child;
  ASSERT_TRUE(grant.process->Bind(child.pid(), child.Descriptor()).ok());
  EXPECT_EQ(TryAttach(sequence).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(engine_->DetachResident(kTenant, ClientId(8), sequence).status().code(),
            absl::StatusCode::kAborted);
  EXPECT_TRUE(State(sequence).attached.ok());
  EXPECT_THAT(std::string(Attach(Filled(data, 1500)).process->Bind(1, UniqueFd()).message()),
              HasSubstr("pidfd"));
}

}  // namespace
}  // namespace wavekv::testing
