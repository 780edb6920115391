// `wavekv record` and `wavekv replay` between real daemons: what one does, another does again.

#include <signal.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/admin.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "storage/trace/layer_trace.h"
#include "tests/client/program.h"
#include "tests/integration/sdk_test.h"

namespace wavekv::integration {
namespace {

using nlohmann::json;
using std::chrono::seconds;
using testing::HasSubstr;

constexpr uint64_t kStored = 3000;
constexpr uint64_t kSteps = 20;
constexpr seconds kWait(60);

class RecordReplayTest : public SdkTest {
 protected:
  void SetUp() override {
    Start({.wave_buffer = false, .pool_bytes = 256ull << 20});
    ASSERT_NE(session_, nullptr);
    sequence_ = CreateFilled(&cache_, 4096);
    ASSERT_NE(sequence_, nullptr);
    file_ = daemons().directory() + "/trace";
  }

  // A decode step over all layers: positions follow, queries and rows are random.
  void DecodeStep(uint64_t number) {
    HostCache token = HostCache::Random(Shape(), 1, 1000 + number);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const HostCache::Chunk chunk = token.Slice(0, 1, layer, 1);
      client::AttendOptions append;
      append.append_keys = client::Tensor{DType::kF32, {2, 64}, chunk.keys.data};
      append.append_values = client::Tensor{DType::kF32, {2, 32}, chunk.values.data};
      const std::vector<float> queries = RandomQueries(Shape(), 7 * number + layer, 3.0f);
      ASSERT_OK(sequence_->Attend(layer, QueryTensor(Shape(), queries), append).status());
    }
  }

  std::vector<std::string> Command(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), ProgramPath("wavekv"));
    arguments.push_back("--address=" + daemons_->address());
    return arguments;
  }
  std::unique_ptr<Process> StartRecord(std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"record", absl::StrCat("--sequence=", sequence_->id()),
                               "--out=" + file_, "--json"});
    auto process = Process::Start({.argv = Command(std::move(more))});
    EXPECT_TRUE(process.ok()) << process.status();
    // It records once the daemon counts it.
    auto admin = client::Admin::Connect({.address = daemons().address()});
    EXPECT_TRUE(admin.ok()) << admin.status();
    const auto deadline = std::chrono::steady_clock::now() + kWait;
    while (std::chrono::steady_clock::now() < deadline) {
      const auto stats = (*admin)->GetStats();
      EXPECT_TRUE(stats.ok()) << stats.status();
      if (!stats.ok() || stats->recordings > 0) break;
    }
    return std::move(process).value();
  }
  // Waits until the file that is being written has all that was stored of so many layers.
  void AwaitStored(uint64_t layers) {
    const uint64_t bytes = kStored * layers * Shape().token_bytes();
    const auto deadline = std::chrono::steady_clock::now() + kWait;
    std::error_code ignored;
    while (std::chrono::steady_clock::now() < deadline &&
           (!std::filesystem::exists(file_ + ".partial") ||
            std::filesystem::file_size(file_ + ".partial", ignored) < bytes)) {
      std::this_thread::yield();
    }
  }
  json Replay(std::vector<std::string> more, int exit_code = 0) {
    more.insert(more.begin(), {"replay", file_, "--json"});
    const ProgramResult result = RunProgram(Command(std::move(more)));
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    return json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  }
  uint64_t SequencesOf(const std::string& address) {
    auto admin = client::Admin::Connect({.address = address});
    EXPECT_TRUE(admin.ok()) << admin.status();
    return (*admin)->ListSequences().value().size();
  }

  HostCache cache_ = HostCache::Random(Shape(), kStored, 1);
  std::unique_ptr<client::Sequence> sequence_;
  std::string file_;
};

TEST_F(RecordReplayTest, AnotherDaemonGivesTheSameAnswers) {
  const std::unique_ptr<Process> record = StartRecord({absl::StrCat("--steps=", kSteps)});
  for (uint64_t step = 0; step < kSteps; ++step) DecodeStep(step);
  ASSERT_EQ(record->WaitForExit(kWait), 0) << record->Output();
  const json recorded = json::parse(record->Output(), nullptr, false);
  EXPECT_EQ(recorded["steps"], 2 * kSteps) << record->Output();
  EXPECT_EQ(recorded["bytes"], std::filesystem::file_size(file_));

  // The file itself.
  const auto traces = LoadLayerTraces(file_, {});
  ASSERT_OK(traces.status());
  ASSERT_EQ(traces->layers.size(), 2u);
  EXPECT_EQ(traces->layers[1].token_count, kStored + kSteps);
  EXPECT_EQ(traces->layers[1].token_counts.size(), kSteps);
  EXPECT_EQ(traces->layers[1].token_counts.back(), kStored + kSteps);
  std::vector<float> first_key(64);
  std::memcpy(first_key.data(), traces->layers[1].keys.data(), 64 * sizeof(float));
  EXPECT_EQ(first_key[3], cache_.Key(1, 0, 0, 3));

  // A second daemon, which never saw the first one's sequence.
  auto second = Daemons::Start({.wave_buffer = false, .pool_bytes = 256ull << 20});
  ASSERT_OK(second.status());
  daemons_.swap(*second);
  const json replayed = Replay({});
  EXPECT_EQ(replayed["total"]["steps"], 2 * kSteps);
  EXPECT_EQ(replayed["total"]["compared_steps"], 2 * kSteps);
  EXPECT_EQ(replayed["layers"].size(), 2u);
  EXPECT_EQ(replayed["steps_overtaken"], 0);
  EXPECT_LT(replayed["total"]["recorded_difference_max"].get<double>(), 1e-5)
      << "same index, same queries, same answers";
  EXPECT_GT(replayed["total"]["mass_covered_mean"].get<double>(), 0.0);
  EXPECT_LE(replayed["total"]["mass_covered_mean"].get<double>(), 1.0);
  EXPECT_GT(replayed["total"]["rel_error_mean"].get<double>(), 0.0);
  EXPECT_LT(replayed["total"]["rel_error_mean"].get<double>(), 1.0);
  EXPECT_LT(replayed["total"]["kv_bytes_read_ratio"].get<double>(), 1.0);
  EXPECT_GT(replayed["total"]["latency_us_p99"].get<double>(), 0.0);
  EXPECT_EQ(SequencesOf(daemons().address()), 0u) << "the replay drops its sequence";

  // With every cluster the answer is the exact one, and the recorded one is not.
  const json all = Replay({"--budget=ratio=1", "--layers=1", "--steps=5", "--sketch_clusters=0"});
  EXPECT_EQ(all["total"]["steps"], 5);
  EXPECT_LT(all["total"]["rel_error_p99"].get<double>(), 1e-4);
  EXPECT_NEAR(all["total"]["mass_covered_mean"].get<double>(), 1, 1e-4);
  EXPECT_GT(all["total"]["recorded_difference_max"].get<double>(), 1e-4);
  const json quick = Replay({"--compare_every=0"});
  EXPECT_EQ(quick["total"]["compared_steps"], 0);
  EXPECT_FALSE(quick["total"].contains("rel_error_mean"));
  daemons_.swap(*second);
}

TEST_F(RecordReplayTest, ASignalEndsTheFileAsItShouldBe) {
  const std::unique_ptr<Process> record = StartRecord({"--layers=1"});
  AwaitStored(1);
  DecodeStep(0);
  record->Signal(SIGINT);
  ASSERT_EQ(record->WaitForExit(kWait), 0) << record->Output();
  EXPECT_THAT(record->Output(), HasSubstr("was stopped"));
  EXPECT_FALSE(std::filesystem::exists(file_ + ".partial"));
  const json replayed = Replay({});
  EXPECT_FALSE(replayed["cut"].get<bool>());
  EXPECT_EQ(replayed["layers"].size(), 1u);
}

TEST_F(RecordReplayTest, ADroppedSequenceEndsTheRecording) {
  const std::unique_ptr<Process> record = StartRecord();
  DecodeStep(0);
  ASSERT_OK(sequence_->Drop());
  ASSERT_EQ(record->WaitForExit(kWait), 0) << record->Output();
  EXPECT_THAT(record->Output(), HasSubstr("dropped"));
  EXPECT_EQ(Replay({})["total"]["steps"], 2);
}

TEST_F(RecordReplayTest, ADaemonThatDiesLeavesACutFile) {
  const std::unique_ptr<Process> record = StartRecord();
  AwaitStored(2);
  daemons().wavekvd().Signal(SIGKILL);
  ASSERT_EQ(record->WaitForExit(kWait), 1) << record->Output();
  EXPECT_TRUE(record->WaitForOutput(file_ + ".partial", kWait)) << record->Output();
  EXPECT_FALSE(std::filesystem::exists(file_));
  ASSERT_TRUE(std::filesystem::exists(file_ + ".partial"));
  sequence_->Release();
  ASSERT_OK(daemons().RestartWavekvd());
  file_ += ".partial";
  const ProgramResult refused = RunProgram(Command({"replay", file_}));
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.err, HasSubstr("is cut"));
  EXPECT_EQ(SequencesOf(daemons().address()), 0u);
  const json replayed = Replay({"--partial"});
  EXPECT_TRUE(replayed["cut"].get<bool>());
  EXPECT_EQ(replayed["tokens_inserted"], 2 * kStored);
}

TEST_F(RecordReplayTest, BadFilesAndNames) {
  const auto run = [&](std::vector<std::string> arguments) {
    const ProgramResult result = RunProgram(Command(std::move(arguments)));
    EXPECT_EQ(result.exit_code, 1) << result.out;
    return result.err;
  };
  std::ofstream(file_) << "not a trace";
  const std::string sequence = absl::StrCat("--sequence=", sequence_->id());
  EXPECT_THAT(run({"record", sequence, "--out=" + file_}), HasSubstr("is there already"));
  EXPECT_THAT(run({"record", sequence, "--out=" + file_ + "2", "--layers=1-2"}),
              HasSubstr("layer is 2, expected less than 2"));
  EXPECT_THAT(run({"record", "--sequence=5", "--out=" + file_ + "2"}), HasSubstr("5"));
  EXPECT_THAT(run({"replay", file_}), HasSubstr("is no trace file"));
  EXPECT_THAT(run({"replay", file_ + "2"}), HasSubstr("cannot be opened"));
  EXPECT_FALSE(std::filesystem::exists(file_ + "2.partial"));
  EXPECT_EQ(SequencesOf(daemons().address()), 1u);
}

}  // namespace
}  // namespace wavekv::integration
