// SDK and command against the real wavekvd and wavebufferd.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cmath>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "client/admin.h"
#include "client/session.h"
#include "nlohmann/json.hpp"
#include "tests/client/program.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/test_backend.h"

namespace wavekv::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::HasSubstr;

constexpr uint64_t kTokens = 3000;  // One segment of 2,048 in small ones, and a rest.

ModelShape Shape() {
  return {.layer_count = 2,
          .query_head_count = 4,
          .kv_head_count = 2,
          .key_dim = 64,
          .value_dim = 32,
          .dtype = DType::kBF16,
          .softmax_scale = 0.125f,
          .model_id = "daemon_test"};
}

class DaemonTest : public testing::Test {
 protected:
  DaemonTest() : random_(seed_) {}

  void StartDaemon(const std::string& wave_buffer = "") {
    daemon_.reset();
    std::vector<std::string> arguments = {WAVEKVD_PATH, "--listen=" + address_,
                                          "--pool_bytes=256MiB"};
    if (!wave_buffer.empty()) {
      arguments.push_back("--wave_buffer=" + wave_buffer);
      arguments.push_back("--wave_buffer_bytes=64MiB");
    }
    daemon_.emplace(arguments);
    ASSERT_NE(daemon_->WaitForLine("event=ready"), "") << daemon_->output();
  }
  absl::StatusOr<std::unique_ptr<Session>> Connect(milliseconds deadline = milliseconds(60000)) {
    return Session::Connect(
        {.address = address_, .client_name = "daemon_test", .deadline = deadline});
  }
  std::vector<uint16_t> RandomBF16(size_t count) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> bits(count);
    for (uint16_t& value : bits) value = FloatToBF16(normal(random_));
    return bits;
  }
  // A sequence with kTokens tokens in both layers.
  std::unique_ptr<Sequence> Prefill(Session& session, bool attach_wave_buffer) {
    auto sequence = session.CreateSequence({.shape = Shape(),
                                            .max_tokens = 2 * kTokens,
                                            .label = "prefilled",
                                            .attach_wave_buffer = attach_wave_buffer});
    if (!sequence.ok()) {
      ADD_FAILURE() << sequence.status();
      return nullptr;
    }
    const std::vector<uint16_t> keys = RandomBF16(2 * kTokens * 2 * 64);
    const std::vector<uint16_t> values = RandomBF16(2 * kTokens * 2 * 32);
    const uint32_t layers[] = {0, 1};
    const absl::Status inserted = (*sequence)->Insert(
        0, layers, {.dtype = DType::kBF16, .shape = {2, kTokens, 2, 64}, .data = keys.data()},
        {.dtype = DType::kBF16, .shape = {2, kTokens, 2, 32}, .data = values.data()});
    EXPECT_TRUE(inserted.ok()) << inserted;
    return *std::move(sequence);
  }
  Tensor NextQueries() {
    queries_ = RandomBF16(4 * 64);
    return {.dtype = DType::kBF16, .shape = {4, 64}, .data = queries_.data()};
  }
  static void ExpectNear(const Attention& a, const Attention& b) {
    ASSERT_EQ(a.out.size(), b.out.size());
    for (size_t i = 0; i < a.out.size(); ++i) ASSERT_NEAR(a.out[i], b.out[i], 2e-4);
    for (size_t i = 0; i < a.lse.size(); ++i) ASSERT_NEAR(a.lse[i], b.lse[i], 2e-4);
  }
  // AttendStaged and Attend, several steps over both layers.
  void CompareStaged(Sequence& sequence) {
    for (uint32_t step = 0; step < 8; ++step) {
      SCOPED_TRACE(testing::Message() << "step " << step << ", seed " << seed_);
      const Tensor queries = NextQueries();
      const uint32_t layer = step % 2;
      const auto staged = sequence.AttendStaged(layer, queries);
      ASSERT_TRUE(staged.ok()) << staged.status();
      const auto direct = sequence.Attend(layer, queries);
      ASSERT_TRUE(direct.ok()) << direct.status();
      ExpectNear(*staged, *direct);
    }
  }
  ProgramResult Wavekv(std::vector<std::string> arguments) const {
    arguments.insert(arguments.begin(), WAVEKV_CLI_PATH);
    return RunProgram(arguments, {"WAVEKV_ADDRESS=" + address_});
  }
  nlohmann::json WavekvJson(std::vector<std::string> arguments) const {
    arguments.push_back("--json");
    const ProgramResult result = Wavekv(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return nlohmann::json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  }

  const uint32_t seed_ = std::random_device()();
  std::mt19937 random_;
  std::vector<uint16_t> queries_;
  TempDir dir_;
  const std::string address_ = absl::StrCat("unix:", dir_.path(), "/d.sock");
  std::optional<ChildProcess> daemon_;
};

// With a wave buffer of either backend.
class DaemonBufferTest : public DaemonTest, public testing::WithParamInterface<std::string> {
 protected:
  const std::vector<std::string> buffer_flags_ = TestBackend(GetParam()).Flags(uint64_t{128} << 20);
};

INSTANTIATE_TEST_SUITE_P(Backends, DaemonBufferTest, testing::Values("host", "cuda"),
                         [](const auto& info) { return info.param; });

TEST_P(DaemonBufferTest, StagedEqualsAttendBeforeAndAfterTheBuild) {
  WavebufferdProcess buffer(dir_.path(), buffer_flags_);
  ASSERT_TRUE(buffer.ready());
  StartDaemon(buffer.address());
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_TRUE((*session)->info().has_wave_buffer);
  const auto sequence = Prefill(**session, true);
  ASSERT_NE(sequence, nullptr);
  CompareStaged(*sequence);
  const auto built = sequence->BuildIndex();
  ASSERT_TRUE(built.ok()) << built.status();
  CompareStaged(*sequence);
}

TEST_P(DaemonBufferTest, AWaveBufferThatCameBackIsFoundAgain) {
  std::optional<WavebufferdProcess> buffer(std::in_place, dir_.path(), buffer_flags_);
  ASSERT_TRUE(buffer->ready());
  StartDaemon(buffer->address());
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Prefill(**session, true);
  ASSERT_NE(sequence, nullptr);
  ASSERT_TRUE(sequence->BuildIndex().ok());
  CompareStaged(*sequence);
  buffer.reset();
  buffer.emplace(dir_.path(), buffer_flags_);
  ASSERT_TRUE(buffer->ready());
  const Tensor queries = NextQueries();
  EXPECT_TRUE(WaitUntil([&] { return sequence->AttendStaged(0, queries).ok(); }));
  CompareStaged(*sequence);
}

TEST_F(DaemonTest, ARestartIsToldAndSurvived) {
  StartDaemon();
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto old = Prefill(**session, false);
  ASSERT_NE(old, nullptr);
  daemon_->Kill();
  StartDaemon();
  const absl::Status status = old->Attend(0, NextQueries()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.message(), HasSubstr("restarted"));
  const auto fresh = Prefill(**session, false);
  ASSERT_NE(fresh, nullptr);
  EXPECT_NE(fresh->id(), old->id());
  EXPECT_TRUE(fresh->Attend(0, NextQueries()).ok());
}

TEST_F(DaemonTest, AStoppedDaemonIsUnavailableWithinTheDeadline) {
  constexpr milliseconds kDeadline(3000);
  StartDaemon();
  const auto session = Connect(kDeadline);
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Prefill(**session, false);
  ASSERT_NE(sequence, nullptr);
  daemon_->Signal(SIGSTOP);
  auto start = steady_clock::now();
  const absl::Status first = sequence->Attend(0, NextQueries()).status();
  EXPECT_EQ(first.code(), absl::StatusCode::kUnavailable) << first;
  EXPECT_LT(steady_clock::now() - start, 3 * kDeadline);
  start = steady_clock::now();
  EXPECT_EQ(sequence->Attend(0, NextQueries()).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(steady_clock::now() - start, kDeadline / 2) << "only the first costs a deadline";
  daemon_->Signal(SIGCONT);
  EXPECT_TRUE(WaitUntil([&] { return sequence->Attend(0, NextQueries()).ok(); }));
  daemon_->Kill();
  EXPECT_EQ(sequence->Attend(0, NextQueries()).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(DaemonTest, TheCommandSeesWhatTheEngineHolds) {
  StartDaemon();
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Prefill(**session, false);
  ASSERT_NE(sequence, nullptr);
  const std::string id = absl::StrCat(sequence->id());

  const nlohmann::json built = WavekvJson({"build", id});
  EXPECT_EQ(built["id"], id);
  ASSERT_TRUE(sequence->Attend(0, NextQueries()).ok());

  const nlohmann::json list = WavekvJson({"sequences"});
  ASSERT_EQ(list["sequences"].size(), 1u);
  EXPECT_EQ(list["sequences"][0]["id"], id);
  EXPECT_EQ(list["sequences"][0]["label"], "prefilled");
  EXPECT_EQ(list["sequences"][0]["client_name"], "daemon_test");
  EXPECT_EQ(list["sequences"][0]["token_count"], kTokens);

  const nlohmann::json index = WavekvJson({"index", id, "--layer", "1", "--head", "0"});
  EXPECT_EQ(index["token_count"], kTokens);
  EXPECT_GT(index["cluster_count"], 0);
  uint64_t clusters = 0;
  for (const auto& count : index["sizes"]["counts"]) clusters += count.get<uint64_t>();
  EXPECT_EQ(index["cluster_count"], clusters);
  EXPECT_THAT(Wavekv({"index", id}).out, HasSubstr("Tokens per cluster"));

  const nlohmann::json explain = WavekvJson({"explain", id, "--layer", "0", "--head", "1"});
  EXPECT_GT(explain["clusters"].size(), 0u);
  EXPECT_NEAR(explain["steady_mass"].get<double>() + explain["retrieval_mass"].get<double>() +
                  explain["estimation_mass"].get<double>(),
              1, 1e-3);
  const nlohmann::json recall = WavekvJson({"recall", id});
  ASSERT_EQ(recall["layers"].size(), 2u);
  EXPECT_EQ(recall["layers"][0]["sampled"], true);
  EXPECT_EQ(recall["layers"][1]["sampled"], false);

  const nlohmann::json status = WavekvJson({"status"});
  EXPECT_GT(status["calls"]["Attend"], 0);
  EXPECT_EQ(Wavekv({"doctor"}).exit_code, 0);
  EXPECT_EQ(Wavekv({"top", "--count", "2", "--interval", "0.01"}).exit_code, 0);

  EXPECT_EQ(WavekvJson({"drop", id})["dropped"], true);
  EXPECT_EQ(sequence->Attend(0, NextQueries()).status().code(), absl::StatusCode::kNotFound);
  const ProgramResult gone = Wavekv({"index", id});
  EXPECT_EQ(gone.exit_code, 1);
  EXPECT_THAT(gone.err, HasSubstr(id));
}

}  // namespace
}  // namespace wavekv::client
