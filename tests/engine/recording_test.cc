// Recording: a trace says what was stored and what happened, in order; no step waits for it.
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "storage/trace/trace_state.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

using ::testing::HasSubstr;

struct ReadBack {
  absl::Status status;  // Of the call that ended it.
  std::vector<TraceRecord> records;

  template <class Record>
  std::vector<const Record*> All() const {
    std::vector<const Record*> found;
    for (const TraceRecord& record : records) {
      if (const auto* held = std::get_if<Record>(&record)) found.push_back(held);
    }
    return found;
  }
  const TraceEnd& end() const { return std::get<TraceEnd>(records.back()); }
};

class RecordingTest : public EngineTest {
 protected:
  void SetUp() override {
    StartEngine(
        {.epoch = 3, .build_threads = 2, .compute_threads = 2, .recording_queue_bytes = 16 << 20},
        uint64_t{256} << 20);
  }

  std::unique_ptr<Recorder> Record(SequenceRef sequence, const RecordingOptions& options = {}) {
    auto recorder = engine_->Record(kTenant, sequence, options);
    EXPECT_TRUE(recorder.ok()) << recorder.status();
    return recorder.ok() ? *std::move(recorder) : nullptr;
  }

  // To the end or the first error. Every record must follow from those before it.
  static ReadBack ReadAll(Recorder* recorder) {
    ReadBack back;
    EXPECT_TRUE(ValidateTraceSequence(recorder->sequence()).ok());
    TraceState state(recorder->sequence());
    while (!state.ended()) {
      absl::StatusOr<TraceRecord> record = recorder->Next();
      if (!record.ok()) {
        back.status = record.status();
        return back;
      }
      const absl::Status admitted = state.Admit(*record);
      EXPECT_TRUE(admitted.ok()) << admitted << ", record " << back.records.size();
      if (!admitted.ok()) return back;
      back.records.push_back(*std::move(record));
    }
    return back;
  }

  // Whether rows are those of the data at their positions.
  void ExpectRows(const TokenData& data, const TraceRows& rows) {
    const size_t key_bytes = shape().key_bytes();
    const size_t value_bytes = shape().value_bytes();
    for (uint64_t token = 0; token < rows.token_count; ++token) {
      for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
        const uint64_t row = token * shape().kv_head_count + head;
        const uint64_t position = rows.first_position + token;
        ASSERT_EQ(std::memcmp(rows.keys.data() + row * key_bytes,
                              data.Key(rows.layer, position, head), key_bytes),
                  0)
            << "key of layer " << rows.layer << ", position " << position;
        ASSERT_EQ(std::memcmp(rows.values.data() + row * value_bytes,
                              data.Value(rows.layer, position, head), value_bytes),
                  0)
            << "value of layer " << rows.layer << ", position " << position;
      }
    }
  }
};

TEST_F(RecordingTest, WhatWasStoredThenWhatHappensInOrder) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  SequenceSpec spec = spec_;
  spec.label = "recorded";
  spec.index.layer_budgets = {{1, {.kind = BudgetKind::kClusters, .value = 7}}};
  const SequenceRef sequence = Create(spec);
  Insert(sequence, data, 0, 1500);
  Build(sequence);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const AttendOutcome ahead = Decode(sequence, data, 0, 1500, queries);  // Layer 1 is behind.

  // Chunks of 100 tokens.
  const auto recorder = Record(sequence, {.rows_bytes_max = 100 * shape().token_bytes()});
  const TraceSequence& header = recorder->sequence();
  EXPECT_EQ(header.shape, spec.shape);
  EXPECT_EQ(header.label, "recorded");
  EXPECT_EQ(header.sequence_id, sequence.id.value());
  EXPECT_TRUE(header.built);
  EXPECT_EQ(header.layers, (std::vector<TraceLayer>{{0, 1501}, {1, 1500}}));
  ASSERT_EQ(header.layer_budgets.size(), 1u);
  EXPECT_EQ(header.layer_budgets[0].second.kind, TraceBudgetKind::kClusters);

  const AttendOutcome second = Decode(sequence, data, 1, 1500, queries);
  const AttendOutcome exact = Attend(sequence, 0, queries, /*exact=*/true);
  EXPECT_EQ(Decode(sequence, data, 1, 1500, queries).out, second.out);  // A retry appends nothing.
  const QueryBuffers query(shape(), sequence, 1, queries);
  ASSERT_TRUE(engine_->Query(kTenant, query.query, {}).ok());
  ASSERT_TRUE(engine_->Estimate(kTenant, query.query).ok());
  EXPECT_FALSE(Attend(sequence, 0, std::vector<float>(queries.size(), NAN)).status.ok());
  Insert(sequence, data, 1400, 200);  // Of which 99 are new.
  Build(sequence);
  const auto truncated = engine_->TruncateSequence(kTenant, sequence, 1550);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  const SequenceRef later = {sequence.id, truncated->generation};
  const AttendOutcome last = Decode(later, data, 0, 1550, queries);
  ASSERT_TRUE(last.status.ok()) << last.status;
  ASSERT_TRUE(engine_->DropSequence(kTenant, later).ok());

  const ReadBack back = ReadAll(recorder.get());
  ASSERT_TRUE(back.status.ok()) << back.status;
  std::string order;
  std::map<uint32_t, uint64_t> stored;
  for (const TraceRecord& record : back.records) {
    if (const auto* rows = std::get_if<TraceRows>(&record)) {
      ExpectRows(data, *rows);
      if (rows->origin == TraceRowsOrigin::kStored) {
        EXPECT_LE(rows->token_count, 100u);
        stored[rows->layer] += rows->token_count;
        continue;
      }
      order += rows->origin == TraceRowsOrigin::kAppend ? 'a' : 'i';
      continue;
    }
    order += std::holds_alternative<TraceStep>(record)    ? 's'
             : std::holds_alternative<TraceBuild>(record) ? 'b'
             : std::holds_alternative<TraceEnd>(record)   ? 'e'
                                                          : 't';
  }
  EXPECT_EQ(stored, (std::map<uint32_t, uint64_t>{{0, 1501}, {1, 1500}}));
  EXPECT_EQ(order,
            "as"
            "s"
            "s"
            "s"
            "s"
            "ii"
            "b"
            "t"
            "as"
            "e");
  EXPECT_EQ(back.end().reason, TraceEndReason::kDropped);
  EXPECT_EQ(back.end().step_count, 6u);

  const auto steps = back.All<TraceStep>();
  ASSERT_EQ(steps.size(), 6u);
  EXPECT_EQ(steps[0]->layer, 1u);
  EXPECT_EQ(steps[0]->token_count, 1501u);
  EXPECT_EQ(steps[0]->queries, queries);
  EXPECT_EQ(steps[0]->out, second.out);
  EXPECT_EQ(steps[0]->lse, second.lse);
  EXPECT_EQ(steps[0]->version, second.version);
  EXPECT_EQ(steps[0]->budget.kind, TraceBudgetKind::kClusters) << "the layer's own";
  EXPECT_EQ(steps[0]->budget.value, 7);
  EXPECT_TRUE(steps[1]->exact);
  EXPECT_EQ(steps[1]->out, exact.out);
  EXPECT_EQ(steps[1]->budget.kind, TraceBudgetKind::kRatio) << "the sequence's";
  EXPECT_EQ(steps[3]->verb, TraceVerb::kQuery);
  EXPECT_EQ(steps[4]->verb, TraceVerb::kEstimate);
  EXPECT_TRUE(steps[4]->out.empty());
  EXPECT_EQ(steps[5]->out, last.out);
  EXPECT_EQ(steps[5]->generation, later.generation.value());
  for (size_t i = 1; i < steps.size(); ++i) EXPECT_GE(steps[i]->at_us, steps[i - 1]->at_us);
  EXPECT_TRUE(ahead.status.ok());
}

TEST_F(RecordingTest, EndsWithTheStepsAskedFor) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 200, seed);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 100);
  const auto both = Record(sequence, {.steps = 3});
  const auto one = Record(sequence, {.layers = {1, 1}, .steps = 2});
  const auto uneven = Record(sequence, {.steps = 4});
  for (uint64_t position = 100; position < 104; ++position) {
    for (uint32_t layer = 0; layer < 2; ++layer) Decode(sequence, data, layer, position, queries);
  }
  Decode(sequence, data, 0, 104, queries);
  Decode(sequence, data, 0, 105, queries);  // After all have ended.

  const ReadBack all = ReadAll(both.get());
  EXPECT_EQ(all.end().reason, TraceEndReason::kSteps);
  EXPECT_EQ(all.All<TraceStep>().size(), 6u);
  const ReadBack second = ReadAll(one.get());
  EXPECT_EQ(second.All<TraceStep>().size(), 2u);
  for (const TraceRows* rows : second.All<TraceRows>()) EXPECT_EQ(rows->layer, 1u);
  EXPECT_EQ(ReadAll(uneven.get()).All<TraceStep>().size(), 8u);

  // A layer that never steps does not keep the others waiting for ever.
  const auto stuck = Record(sequence, {.steps = 1});
  Decode(sequence, data, 0, 106, queries);
  Decode(sequence, data, 0, 107, queries);
  const ReadBack ended = ReadAll(stuck.get());
  EXPECT_EQ(ended.end().reason, TraceEndReason::kSteps);
  EXPECT_EQ(ended.All<TraceStep>().size(), 1u);
}

TEST_F(RecordingTest, AReaderThatFallsBehindIsToldAndStepsGoOn) {
  const uint64_t seed = FreshSeed();
  StartEngine({.epoch = 3, .build_threads = 1, .recording_queue_bytes = 1 << 20},
              uint64_t{256} << 20);
  const TokenData data(shape(), 1, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 1);
  const auto slow = Record(sequence);
  ASSERT_TRUE(slow->Next().ok()) << "its first rows";
  const std::vector<float> queries = RandomQueries(shape(), seed);
  uint64_t steps = 0;
  while (engine_->Stats().recording_queued_bytes > 0 || steps == 0) {
    ASSERT_TRUE(Attend(sequence, 0, queries).status.ok());
    ++steps;
    ASSERT_LE(engine_->Stats().recording_queued_bytes, 1u << 20);
  }
  ASSERT_TRUE(Attend(sequence, 0, queries).status.ok());
  const ReadBack back = ReadAll(slow.get());
  EXPECT_EQ(back.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(back.status.message()),
              HasSubstr(absl::StrCat("after ", steps - 1, " steps of layers")));
  EXPECT_THAT(std::string(back.status.message()), HasSubstr("--recording_queue_bytes"));
  // What it did not read is gone, and the next one is as good as new.
  const auto next = Record(sequence, {.steps = 1});
  Attend(sequence, 0, queries);
  Attend(sequence, 1, queries);
  EXPECT_EQ(ReadAll(next.get()).end().reason, TraceEndReason::kSteps);
}

// Rows that the sequence gives up before the recorder has read them are the recorder's until then.
TEST_F(RecordingTest, RowsOutliveTruncatesAndTheSequence) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  TokenData other(shape(), 3000, seed + 1);
  SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 2000);
  Build(sequence);
  auto recorder = Record(sequence, {.rows_bytes_max = 64 * shape().token_bytes()});
  ASSERT_TRUE(recorder->Next().ok()) << "in the middle of the stored rows";
  const auto truncated = engine_->TruncateSequence(kTenant, sequence, 10);
  ASSERT_TRUE(truncated.ok());
  sequence.generation = truncated->generation;
  Insert(sequence, data, 10, 500);
  ASSERT_TRUE(engine_->TruncateSequence(kTenant, sequence, 20).ok());
  sequence.generation = Generation(sequence.generation.value() + 1);
  for (uint64_t position = 20; position < 40; ++position) {
    Insert(sequence, data, position, 1);
  }
  ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  EXPECT_GT(pool_->Usage().allocated_bytes, 0u) << "the rows wait to be read";

  ReadBack back;
  for (;;) {
    auto record = recorder->Next();
    ASSERT_TRUE(record.ok()) << record.status();
    back.records.push_back(*std::move(record));
    if (std::holds_alternative<TraceEnd>(back.records.back())) break;
  }
  uint64_t tokens = 0;
  for (const TraceRows* rows : back.All<TraceRows>()) {
    ExpectRows(data, *rows);
    tokens += rows->token_count;
  }
  EXPECT_EQ(tokens, 2 * (2000 + 500 + 20) - 64u) << "the first piece was read before";
  EXPECT_EQ(back.All<TraceTruncate>().size(), 2u);
  back.records.clear();
  recorder.reset();
  while (pool_->Usage().reserved_bytes > 0) std::this_thread::yield();  // It may be building.
  EXPECT_EQ(engine_->Stats().recordings, 0u);
}

TEST_F(RecordingTest, WhoMayRecordAndHowMuch) {
  StartEngine(
      {.epoch = 3, .build_threads = 1, .recordings_max = 2, .recording_queue_bytes = 16 << 20},
      uint64_t{64} << 20);
  const SequenceRef sequence = Create(spec_);
  const auto code = [&](const TenantId& tenant, SequenceRef ref, std::vector<uint32_t> layers) {
    return engine_->Record(tenant, ref, {.layers = std::move(layers)}).status().code();
  };
  EXPECT_EQ(code("uid:1001", sequence, {}), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(kTenant, {SequenceId(5), Generation(0)}, {}), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(kTenant, {sequence.id, Generation(9)}, {}), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(kTenant, sequence, {0, 2}), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine_->Stats().recordings, 0u);
  const uint64_t before = pool_->Usage().reserved_bytes;
  {
    const auto first = Record(sequence);
    EXPECT_GE(pool_->Usage().reserved_bytes, before + (16 << 20)) << "the queue is counted";
    const auto second = Record(sequence);
    EXPECT_EQ(engine_->Stats().recordings, 2u);
    const absl::Status third = engine_->Record(kTenant, sequence, {}).status();
    EXPECT_EQ(third.code(), absl::StatusCode::kResourceExhausted);
    EXPECT_THAT(std::string(third.message()), HasSubstr("--recordings_max"));
  }
  EXPECT_EQ(pool_->Usage().reserved_bytes, before);
  // A queue that the pool has no room for is refused, and leaves nothing.
  StartEngine({.epoch = 3, .build_threads = 1, .recording_queue_bytes = 60 << 20},
              uint64_t{64} << 20);
  const SequenceRef large = Create(spec_);
  const absl::Status refused = engine_->Record(kTenant, large, {}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_EQ(engine_->Stats().recordings, 0u);
}

TEST_F(RecordingTest, EndsAsItIsTold) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 100, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 100);
  const auto stopped = Record(sequence);
  stopped->Finish(TraceEndReason::kDaemonStopped);
  Attend(sequence, 0, RandomQueries(shape(), seed));
  const ReadBack back = ReadAll(stopped.get());
  EXPECT_EQ(back.end().reason, TraceEndReason::kDaemonStopped);
  EXPECT_EQ(back.end().step_count, 0u) << "what comes later is not in it";

  const auto cancelled = Record(sequence);
  absl::Status status;
  std::thread reader([&] { status = ReadAll(cancelled.get()).status; });
  cancelled->Cancel();
  reader.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);

  // A fork is another sequence; the owner's lease ends both.
  const auto recorder = Record(sequence);
  const auto child = engine_->ForkSequence(kTenant, kOwner, sequence, 0, 0, "child");
  ASSERT_TRUE(child.ok()) << child.status();
  Attend({child->id, child->generation}, 0, RandomQueries(shape(), seed));
  EXPECT_EQ(engine_->ReleaseOwner(kOwner), 2u);
  const ReadBack last = ReadAll(recorder.get());
  EXPECT_EQ(last.end().reason, TraceEndReason::kDropped);
  EXPECT_TRUE(last.All<TraceStep>().empty());
}

// Layers step beside each other and beside truncates and builds, while two recorders read: each
// trace can be, and each rows record holds what was appended.
TEST_F(RecordingTest, StepsTruncatesAndRecordersAtOnce) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 1200);
  Build(sequence);
  const auto whole = Record(sequence, {.rows_bytes_max = 50 * shape().token_bytes()});
  const auto part = Record(sequence, {.layers = {1}});
  ReadBack all;
  ReadBack one;
  std::thread first_reader([&] { all = ReadAll(whole.get()); });
  std::thread second_reader([&] { one = ReadAll(part.get()); });
  uint64_t generation = sequence.generation.value();
  std::atomic<uint64_t> answered = 0;
  for (int round = 0; round < 6; ++round) {
    const SequenceRef now = {sequence.id, Generation(generation)};
    std::vector<std::thread> layers;
    for (uint32_t layer = 0; layer < 2; ++layer) {
      layers.emplace_back([&, layer, now] {
        for (uint64_t position = 1200; position < 1230; ++position) {
          const AttendOutcome outcome =
              Decode(now, data, layer, position, RandomQueries(shape(), seed + position));
          // The truncate below may come first.
          if (!outcome.status.ok()) break;
          ++answered;
        }
      });
    }
    std::thread builder([&] { engine_->BuildIndex(kTenant, now, nullptr).IgnoreError(); });
    if (round % 2 == 0) {
      for (std::thread& layer : layers) layer.join();
      builder.join();
    }
    const auto truncated = engine_->TruncateSequence(kTenant, now, 1200);
    ASSERT_TRUE(truncated.ok()) << truncated.status();
    generation = truncated->generation.value();
    if (round % 2 == 1) {
      for (std::thread& layer : layers) layer.join();
      builder.join();
    }
  }
  ASSERT_TRUE(engine_->DropSequence(kTenant, {sequence.id, Generation(0)}).ok());
  first_reader.join();
  second_reader.join();
  ASSERT_TRUE(all.status.ok()) << all.status;
  ASSERT_TRUE(one.status.ok()) << one.status;
  EXPECT_EQ(all.All<TraceStep>().size(), answered.load());
  EXPECT_EQ(all.All<TraceTruncate>().size(), 6u);
  for (const TraceRows* rows : all.All<TraceRows>()) ExpectRows(data, *rows);
  size_t of_layer = 0;
  for (const TraceStep* step : all.All<TraceStep>()) of_layer += step->layer == 1 ? 1 : 0;
  EXPECT_EQ(one.All<TraceStep>().size(), of_layer);
}

}  // namespace
}  // namespace wavekv::testing
