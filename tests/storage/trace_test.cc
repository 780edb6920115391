#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "storage/trace/layer_trace.h"
#include "tests/storage/trace_fixture.h"

namespace wavekv {
namespace {

using testing::HasSubstr;

class TraceTest : public TraceFixture {};

TEST_F(TraceTest, ComesBackAsItWasWritten) {
  const TraceSequence sequence = Sequence();
  const std::vector<TraceRecord> records = Records(sequence);
  WriteTrace(sequence, records);
  auto reader = TraceReader::Open(path_);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->sequence(), sequence);
  ReadBack back = Read(path_);
  ASSERT_TRUE(back.status.ok()) << back.status;
  EXPECT_FALSE(back.cut);
  ASSERT_EQ(back.records.size(), records.size() + 1);
  EXPECT_EQ(std::get<TraceEnd>(back.records.back()),
            (TraceEnd{TraceEndReason::kSteps, /*step_count=*/5}));
  back.records.pop_back();
  EXPECT_EQ(back.records, records);
}

TEST_F(TraceTest, HasItsNameOnlyOnceItIsWhole) {
  const TraceSequence sequence = Sequence();
  auto writer = TraceWriter::Create(path_, sequence);
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_TRUE(std::filesystem::exists(PartialTracePath(path_)));
  EXPECT_EQ(TraceWriter::Create(path_, sequence).status().code(), absl::StatusCode::kAlreadyExists)
      << "another writer is at work on it";
  const absl::Status early = (*writer)->Finish(TraceEndReason::kStopped);
  EXPECT_THAT(std::string(early.message()), HasSubstr("layer 1 has rows of 0 stored tokens, of 21"))
      << "what was stored is missing";
  for (const TraceRecord& record : Records(sequence)) ASSERT_TRUE((*writer)->Write(record).ok());
  EXPECT_EQ(std::filesystem::file_size(PartialTracePath(path_)), (*writer)->bytes_written());
  ASSERT_TRUE((*writer)->Finish(TraceEndReason::kStopped).ok());
  EXPECT_FALSE(std::filesystem::exists(PartialTracePath(path_)));
  EXPECT_TRUE(Read(path_).status.ok());

  const auto again = TraceWriter::Create(path_, sequence);
  EXPECT_EQ(again.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(again.status().message()), HasSubstr(path_));
}

TEST_F(TraceTest, ACutFileOfAnEarlierRecordingIsWrittenOver) {
  const TraceSequence sequence = Sequence();
  WriteTrace(sequence, Records(sequence), /*finish=*/false);
  const std::vector<TraceRecord> records = Records(sequence);
  WriteTrace(sequence, records);
  const ReadBack back = Read(path_);
  ASSERT_TRUE(back.status.ok()) << back.status;
  EXPECT_TRUE(std::equal(records.begin(), records.end(), back.records.begin()));
}

TEST_F(TraceTest, AFileCreatedMeanwhileIsNotReplaced) {
  TraceSequence sequence = Sequence();
  sequence.layers = {{2, 0}};
  auto writer = TraceWriter::Create(path_, sequence);
  ASSERT_TRUE(writer.ok()) << writer.status();
  WriteBytes(path_, "somebody's");
  EXPECT_EQ((*writer)->Finish(TraceEndReason::kStopped).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(FileBytes(path_), "somebody's");
  EXPECT_TRUE(std::filesystem::exists(PartialTracePath(path_)));
}

TEST_F(TraceTest, WriterRefusesWhatNoReaderTakes) {
  const TraceSequence sequence = Sequence();
  const std::vector<TraceRecord> records = Records(sequence);
  const auto rows = [&](uint32_t layer, TraceRowsOrigin origin, uint64_t generation, uint64_t first,
                        uint64_t count) {
    return TraceRecord(Rows(sequence, layer, origin, generation, first, count));
  };
  TraceRows short_keys = Rows(sequence, 1, TraceRowsOrigin::kInsert, 6, 23, 2);
  short_keys.keys.pop_back();
  TraceStep no_answer = Step(sequence, 1, TraceVerb::kAttend, 6, 23);
  no_answer.lse.clear();
  TraceStep bad_budget = Step(sequence, 1, TraceVerb::kQuery, 6, 23);
  bad_budget.budget.kind = static_cast<TraceBudgetKind>(5);
  const struct {
    const char* why;
    TraceRecord record;
    const char* text;
  } rows_of_table[] = {
      {"no layer of the trace", rows(2, TraceRowsOrigin::kInsert, 6, 0, 1), "layer 2 is none of"},
      {"a gap", rows(1, TraceRowsOrigin::kInsert, 6, 24, 1), "from position 23"},
      {"an overlap", rows(1, TraceRowsOrigin::kAppend, 6, 22, 1), "from position 23"},
      {"no rows", rows(1, TraceRowsOrigin::kInsert, 6, 23, 0), "expected 1 to 977"},
      {"beyond max_tokens", rows(1, TraceRowsOrigin::kInsert, 6, 23, 978), "expected 1 to 977"},
      {"an earlier generation", rows(1, TraceRowsOrigin::kInsert, 5, 23, 1), "generation 5"},
      {"stored rows come first", rows(1, TraceRowsOrigin::kStored, 6, 23, 1), "stored rows"},
      {"a size that the shape does not give", short_keys, "keys has a size of"},
      {"an Attend without its answer", no_answer, "lse has a size of 0"},
      {"no budget", bad_budget, "kind 5"},
      {"more tokens than there are", Step(sequence, 1, TraceVerb::kQuery, 6, 24), "over 24 tokens"},
      {"a step of a later generation", Step(sequence, 1, TraceVerb::kQuery, 7, 1), "generation 7"},
      {"a step of no generation", Step(sequence, 1, TraceVerb::kQuery, 0, 1), "generation 0"},
      {"a build of an earlier generation", TraceBuild{5}, "generation 5"},
      {"a truncate that bumps nothing", TraceTruncate{6, 3}, "generation 6"},
      {"a truncate to more than there is", TraceTruncate{7, 24}, "to 24 tokens"},
      {"an end by Write", TraceEnd{}, "Finish"},
  };
  auto writer = TraceWriter::Create(path_, sequence);
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_THAT(std::string((*writer)->Write(records[3]).message()),
              HasSubstr("that must come first"));
  for (const TraceRecord& record : records) ASSERT_TRUE((*writer)->Write(record).ok());
  for (const auto& row : rows_of_table) {
    const absl::Status refused = (*writer)->Write(row.record);
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << row.why;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(row.text)) << row.why;
  }
  ASSERT_TRUE((*writer)->Finish(TraceEndReason::kDropped).ok());
  EXPECT_EQ(Read(path_).records.size(), records.size() + 1) << "what was refused left no trace";
}

TEST_F(TraceTest, WriterRefusesSequencesThatCannotBe) {
  const struct {
    const char* why;
    void (*spoil)(TraceSequence*);
    const char* text;
  } rows[] = {
      {"the shape's own rules", [](TraceSequence* s) { s->shape.key_dim = 31; }, "key_dim"},
      {"no tokens", [](TraceSequence* s) { s->max_tokens = 0; }, "max_tokens"},
      {"no layers", [](TraceSequence* s) { s->layers.clear(); }, "no layer"},
      {"a layer that is not", [](TraceSequence* s) { s->layers[1].layer = 4; }, "layer 4"},
      {"layers out of order", [](TraceSequence* s) { s->layers[1].layer = 1; }, "ascending"},
      {"too many tokens", [](TraceSequence* s) { s->layers[0].token_count = 1001; }, "1001"},
      {"a dense layer that is not", [](TraceSequence* s) { s->dense_layers = {9}; }, "layer 9"},
      {"budgets past counting", [](TraceSequence* s) { s->layer_budgets.resize(5); }, "5 layer"},
      {"a value that is none", [](TraceSequence* s) { s->budget.value = NAN; }, "nan"},
      {"a label too long", [](TraceSequence* s) { s->label.resize(129); }, "129"},
      {"no generation", [](TraceSequence* s) { s->generation = 0; }, "generation"},
  };
  for (const auto& row : rows) {
    TraceSequence sequence = Sequence();
    row.spoil(&sequence);
    const auto writer = TraceWriter::Create(path_, sequence);
    EXPECT_EQ(writer.status().code(), absl::StatusCode::kInvalidArgument) << row.why;
    EXPECT_THAT(std::string(writer.status().message()), HasSubstr(row.text)) << row.why;
  }
  EXPECT_TRUE(std::filesystem::is_empty(directory_));
}

TEST_F(TraceTest, PathsThatCannotBeSayWhy) {
  const auto missing = TraceReader::Open(path_);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr(path_));
  const auto directory = TraceReader::Open(directory_);
  EXPECT_THAT(std::string(directory.status().message()), HasSubstr("no regular file"));
  const auto nowhere = TraceWriter::Create(directory_ + "/none/trace", Sequence());
  EXPECT_EQ(nowhere.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(nowhere.status().message()), HasSubstr("/none/trace.partial"));
}

// Layers as a study wants them, against the records one by one.
TEST_F(TraceTest, LayersInMemory) {
  const TraceSequence sequence = Sequence();
  const std::vector<TraceRecord> records = Records(sequence);
  WriteTrace(sequence, records);
  const uint32_t order[] = {3, 1};
  const auto traces = LoadLayerTraces(path_, order);
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_EQ(traces->sequence, sequence);
  EXPECT_FALSE(traces->cut);
  ASSERT_EQ(traces->layers.size(), 2u);

  // The truncate to 20 tokens took position 20 of layer 3 and every step that saw it.
  const LayerTrace& three = traces->layers[0];
  EXPECT_EQ(three.layer, 3u);
  EXPECT_EQ(three.stored_count, 20u);
  EXPECT_EQ(three.token_count, 60u);
  EXPECT_EQ(three.token_counts, std::vector<uint64_t>{60});
  EXPECT_EQ(three.queries, std::get<TraceStep>(records[11]).queries);
  const auto& stored = std::get<TraceRows>(records[2]);
  const auto& inserted = std::get<TraceRows>(records[10]);
  std::vector<std::byte> keys = stored.keys;
  keys.insert(keys.end(), inserted.keys.begin(), inserted.keys.end());
  EXPECT_EQ(three.keys, keys);
  std::vector<std::byte> values = stored.values;
  values.insert(values.end(), inserted.values.begin(), inserted.values.end());
  EXPECT_EQ(three.values, values);

  const LayerTrace& one = traces->layers[1];
  EXPECT_EQ(one.token_count, 23u);
  EXPECT_TRUE(one.token_counts.empty());
  EXPECT_EQ(one.keys.size(), 23 * sequence.shape.kv_head_count * sequence.shape.key_bytes());

  const auto all = LoadLayerTraces(path_, {});
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->layers.size(), 2u);
  const uint32_t absent[] = {2};
  EXPECT_EQ(LoadLayerTraces(path_, absent).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(TraceTest, LayersKeepTheStepsBeforeATruncateThatTookNothingOfTheirs) {
  TraceSequence sequence = Sequence();
  sequence.layers = {{1, 10}};
  std::vector<TraceRecord> records;
  records.emplace_back(Rows(sequence, 1, TraceRowsOrigin::kStored, 5, 0, 10));
  records.emplace_back(Step(sequence, 1, TraceVerb::kAttend, 5, 10));
  records.emplace_back(Rows(sequence, 1, TraceRowsOrigin::kAppend, 5, 10, 1));
  records.emplace_back(Step(sequence, 1, TraceVerb::kAttend, 5, 11));
  records.emplace_back(Step(sequence, 1, TraceVerb::kAttend, 5, 10));
  records.emplace_back(TraceTruncate{6, 10});
  WriteTrace(sequence, records, /*finish=*/false);
  EXPECT_EQ(LoadLayerTraces(PartialTracePath(path_), {}).status().code(),
            absl::StatusCode::kDataLoss);
  const auto traces = LoadLayerTraces(PartialTracePath(path_), {}, {.accept_cut = true});
  ASSERT_TRUE(traces.ok()) << traces.status();
  EXPECT_TRUE(traces->cut);
  const LayerTrace& layer = traces->layers.front();
  EXPECT_EQ(layer.token_counts, (std::vector<uint64_t>{10, 10}));
  std::vector<float> queries = std::get<TraceStep>(records[1]).queries;
  const std::vector<float>& later = std::get<TraceStep>(records[4]).queries;
  queries.insert(queries.end(), later.begin(), later.end());
  EXPECT_EQ(layer.queries, queries);
}

}  // namespace
}  // namespace wavekv
