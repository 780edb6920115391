// Random traces for the tests of trace files.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "storage/trace/trace_reader.h"
#include "storage/trace/trace_records.h"
#include "storage/trace/trace_writer.h"

namespace wavekv {

class TraceFixture : public testing::Test {
 protected:
  TraceFixture() {
    char name[] = "/tmp/wavekv-trace-XXXXXX";
    directory_ = ::mkdtemp(name);
    path_ = directory_ + "/trace";
    const char* const wanted = std::getenv("WAVEKV_TEST_SEED");
    const uint64_t seed =
        wanted == nullptr ? std::random_device()() : std::strtoull(wanted, nullptr, 10);
    std::cout << "seed " << seed << std::endl;
    random_.seed(seed);
  }
  ~TraceFixture() override { std::filesystem::remove_all(directory_); }

  uint64_t Below(uint64_t limit) { return random_() % limit; }
  std::vector<std::byte> Bytes(size_t count) {
    std::vector<std::byte> bytes(count);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    return bytes;
  }
  std::vector<float> Floats(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> floats(count);
    for (float& value : floats) value = normal(random_);
    return floats;
  }

  // Layers 1 and 3 of four; key and value dims differ; layer 3 was a token behind.
  TraceSequence Sequence() {
    TraceSequence sequence;
    sequence.shape = {.layer_count = 4,
                      .query_head_count = 6,
                      .kv_head_count = 2,
                      .key_dim = 32,
                      .value_dim = 48,
                      .dtype = DType::kBF16,
                      .softmax_scale = 0.25f,
                      .model_id = "a model"};
    sequence.first_kv_head = 2;
    sequence.total_kv_head_count = 8;
    sequence.segment_tokens = 4096;
    sequence.small_segment_tokens = 2048;
    sequence.tokens_per_cluster = 12;
    sequence.kmeans_iterations = 7;
    sequence.sketch = false;
    sequence.budget = Budget();
    sequence.layer_budgets = {{2, Budget()}, {3, Budget()}};
    sequence.dense_layers = {0};
    sequence.max_tokens = 1000;
    sequence.label = "a label";
    sequence.sequence_id = random_();
    sequence.generation = 5;
    sequence.built = true;
    sequence.began_unix_ms = 1'800'000'000'000;
    sequence.daemon_version = "1.2.3";
    sequence.layers = {{1, 21}, {3, 20}};
    return sequence;
  }
  TraceBudget Budget() {
    return {.kind = static_cast<TraceBudgetKind>(1 + Below(4)),
            .value = static_cast<double>(Below(1000)) / 1000,
            .clusters_max = static_cast<uint32_t>(Below(100)),
            .estimate_ratio = 0.5,
            .sketch_clusters = static_cast<uint32_t>(Below(4096))};
  }
  TraceRows Rows(const TraceSequence& sequence, uint32_t layer, TraceRowsOrigin origin,
                 uint64_t generation, uint64_t first_position, uint64_t token_count) {
    const ModelShape& shape = sequence.shape;
    const uint64_t head_rows = token_count * shape.kv_head_count;
    return {layer,
            origin,
            generation,
            first_position,
            token_count,
            Bytes(head_rows * shape.key_bytes()),
            Bytes(head_rows * shape.value_bytes())};
  }
  TraceStep Step(const TraceSequence& sequence, uint32_t layer, TraceVerb verb, uint64_t generation,
                 uint64_t token_count) {
    const ModelShape& shape = sequence.shape;
    TraceStep step;
    step.layer = layer;
    step.verb = verb;
    step.exact = Below(2) == 1;
    step.generation = generation;
    step.version = random_();
    step.token_count = token_count;
    step.at_us = random_();
    step.budget = Budget();
    step.queries = Floats(size_t{shape.query_head_count} * shape.key_dim);
    if (verb == TraceVerb::kAttend) {
      step.out = Floats(size_t{shape.query_head_count} * shape.value_dim);
      step.lse = Floats(shape.query_head_count);
    }
    return step;
  }

  // Every kind of record but the end, in an order that can be: what was stored, two decode steps
  // with a build between, a truncate, an insert, a step after it, one that the truncate overtook.
  std::vector<TraceRecord> Records(const TraceSequence& sequence) {
    using Origin = TraceRowsOrigin;
    std::vector<TraceRecord> records;
    records.emplace_back(Rows(sequence, 1, Origin::kStored, 5, 0, 16));
    records.emplace_back(Rows(sequence, 1, Origin::kStored, 5, 16, 5));
    records.emplace_back(Rows(sequence, 3, Origin::kStored, 5, 0, 20));
    records.emplace_back(Step(sequence, 1, TraceVerb::kAttend, 5, 21));
    records.emplace_back(Rows(sequence, 3, Origin::kAppend, 5, 20, 1));
    records.emplace_back(Step(sequence, 3, TraceVerb::kAttend, 5, 21));
    records.emplace_back(TraceBuild{5});
    records.emplace_back(Rows(sequence, 1, Origin::kAppend, 5, 21, 1));
    records.emplace_back(Step(sequence, 1, TraceVerb::kQuery, 5, 22));
    records.emplace_back(TraceTruncate{6, 20});
    records.emplace_back(Rows(sequence, 3, Origin::kInsert, 6, 20, 40));
    records.emplace_back(Step(sequence, 3, TraceVerb::kEstimate, 6, 60));
    records.emplace_back(Step(sequence, 3, TraceVerb::kAttend, 5, 21));
    records.emplace_back(Rows(sequence, 1, Origin::kInsert, 6, 20, 3));
    return records;
  }

  // Writes a whole trace at path_ (cut: without its end, at its partial name).
  void WriteTrace(const TraceSequence& sequence, const std::vector<TraceRecord>& records,
                  bool finish = true) {
    auto writer = TraceWriter::Create(path_, sequence);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (const TraceRecord& record : records) {
      const absl::Status written = (*writer)->Write(record);
      ASSERT_TRUE(written.ok()) << written;
    }
    if (!finish) return;
    const absl::Status finished = (*writer)->Finish(TraceEndReason::kSteps);
    ASSERT_TRUE(finished.ok()) << finished;
  }

  // What a reader gives until it has no more or fails.
  struct ReadBack {
    absl::Status status;
    std::vector<TraceRecord> records;
    bool cut = false;
  };
  ReadBack Read(const std::string& path, bool accept_cut = false) {
    ReadBack back;
    auto reader = TraceReader::Open(path, {.accept_cut = accept_cut});
    if (!reader.ok()) return {reader.status(), {}, false};
    for (;;) {
      auto record = (*reader)->Next();
      if (!record.ok()) {
        back.status = record.status();
        return back;
      }
      if (!record->has_value()) break;
      back.records.push_back(**std::move(record));
    }
    back.cut = (*reader)->cut();
    return back;
  }

  static std::string FileBytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  static void WriteBytes(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
  }

  std::string directory_;
  std::string path_;
  std::mt19937_64 random_;
};

}  // namespace wavekv
