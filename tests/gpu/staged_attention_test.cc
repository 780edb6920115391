// The portable path end to end: wavekvd ranks and stages, wavebufferd owns the memory, and this
// process, an engine with the SDK, attends over what it finds there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/test_backend.h"
#include "tests/program_path.h"

namespace wavekv {
namespace {

constexpr uint32_t kLayers = 2;
constexpr int64_t kQueryHeads = 4;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kDim = 64;
constexpr int64_t kTokens = 3000;
constexpr double kTolerance = 1e-4;  // Both sides sum float32 in other orders.

std::vector<float> RandomFloats(size_t count, std::mt19937_64* random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(*random);
  return values;
}

client::Tensor TensorOf(const std::vector<float>& values, std::vector<int64_t> shape) {
  return {.dtype = DType::kF32, .shape = std::move(shape), .data = values.data()};
}

double MaxDifference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i)
    most = std::max(most, std::abs(double{a[i]} - double{b[i]}));
  return most;
}

// No driver, no context.
bool HasLoadedCuda(pid_t pid, const std::string& program) {
  std::ifstream maps(absl::StrCat("/proc/", pid, "/maps"));
  std::stringstream text;
  text << maps.rdbuf();
  EXPECT_THAT(text.str(), testing::HasSubstr(program));
  return text.str().find("libcuda") != std::string::npos;
}

class StagedAttentionTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    SCOPED_TRACE(testing::Message() << "seed " << seed_);
    StartWavebufferd();
    wavekvd_ = std::make_unique<ChildProcess>(std::vector<std::string>{
        ProgramPath("wavekvd"), "--listen=unix:" + directory_.path() + "/wavekvd.sock",
        "--pool_bytes=256MiB", "--wave_buffer=" + wavebufferd_->address(),
        "--wave_buffer_bytes=32MiB"});
    ASSERT_FALSE(wavekvd_->WaitForLine("event=ready").empty()) << wavekvd_->output();
    EXPECT_FALSE(
        HasLoadedCuda(wavekvd_->pid(), "wavekvd"));  // Nobody has asked for a wave buffer yet.
    auto session =
        client::Session::Connect({.address = "unix:" + directory_.path() + "/wavekvd.sock"});
    ASSERT_TRUE(session.ok()) << session.status();
    session_ = *std::move(session);
    Prefill();
  }

  void StartWavebufferd() {
    wavebufferd_ =
        std::make_unique<WavebufferdProcess>(directory_.path(), backend_.Flags(uint64_t{64} << 20));
    ASSERT_TRUE(wavebufferd_->ready()) << wavebufferd_->process().output();
  }

  void Prefill() {
    client::SequenceOptions options;
    options.shape.layer_count = kLayers;
    options.shape.query_head_count = kQueryHeads;
    options.shape.kv_head_count = kKvHeads;
    options.shape.key_dim = kDim;
    options.shape.value_dim = kDim;
    options.shape.dtype = DType::kF32;
    options.shape.softmax_scale = 0.125f;
    options.max_tokens = 4096;
    options.attach_wave_buffer = true;
    options.index.budget = client::Budget::Ratio(0.03);
    auto sequence = session_->CreateSequence(options);
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    sequence_ = *std::move(sequence);
    const std::vector<uint32_t> layers = {0, 1};
    const std::vector<float> keys = RandomFloats(kLayers * kTokens * kKvHeads * kDim, &random_);
    const std::vector<float> values = RandomFloats(keys.size(), &random_);
    const std::vector<int64_t> shape = {kLayers, kTokens, kKvHeads, kDim};
    const absl::Status inserted =
        sequence_->Insert(0, layers, TensorOf(keys, shape), TensorOf(values, shape));
    ASSERT_TRUE(inserted.ok()) << inserted;
    const auto built = sequence_->BuildIndex();
    ASSERT_TRUE(built.ok()) << built.status();
  }

  std::vector<float> RandomQuery() { return RandomFloats(kQueryHeads * kDim, &random_); }
  absl::StatusOr<client::Attention> Staged(uint32_t layer, const std::vector<float>& query) {
    return sequence_->AttendStaged(layer, TensorOf(query, {kQueryHeads, kDim}));
  }
  absl::StatusOr<client::Attention> Served(uint32_t layer, const std::vector<float>& query) {
    return sequence_->Attend(layer, TensorOf(query, {kQueryHeads, kDim}));
  }

  const uint64_t seed_ = std::random_device{}();
  std::mt19937_64 random_{seed_};
  const TestBackend backend_{GetParam()};
  TempDir directory_;
  std::unique_ptr<WavebufferdProcess> wavebufferd_;
  std::unique_ptr<ChildProcess> wavekvd_;
  std::unique_ptr<client::Session> session_;
  std::unique_ptr<client::Sequence> sequence_;
};

INSTANTIATE_TEST_SUITE_P(Backends, StagedAttentionTest, ::testing::Values("host", "cuda"),
                         [](const auto& info) { return info.param; });

TEST_P(StagedAttentionTest, EqualsWhatTheDaemonAnswers) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  const std::vector<std::vector<float>> queries = {RandomQuery(), RandomQuery(), RandomQuery()};
  for (int round = 0; round < 30; ++round) {
    const uint32_t layer = round % kLayers;
    const std::vector<float>& query = queries[random_() % queries.size()];
    const auto staged = Staged(layer, query);
    ASSERT_TRUE(staged.ok()) << staged.status();
    const auto served = Served(layer, query);
    ASSERT_TRUE(served.ok()) << served.status();
    EXPECT_LT(MaxDifference(staged->out, served->out), kTolerance);
    EXPECT_LT(MaxDifference(staged->lse, served->lse), kTolerance);
    EXPECT_GT(staged->counters.retrieved_clusters, 0u);
  }
}

TEST_P(StagedAttentionTest, DriverIsLoadedForAGpuAlone) {
  ASSERT_TRUE(Staged(0, RandomQuery()).ok());
  EXPECT_EQ(HasLoadedCuda(wavekvd_->pid(), "wavekvd"), backend_.cuda());
  EXPECT_EQ(HasLoadedCuda(wavebufferd_->process().pid(), "wavebufferd"), backend_.cuda());
}

TEST_P(StagedAttentionTest, WorkingSetBecomesHits) {
  const std::vector<float> query = RandomQuery();
  const auto cold = Staged(0, query);
  ASSERT_TRUE(cold.ok()) << cold.status();
  EXPECT_EQ(cold->counters.cache_hit_blocks, 0u);
  EXPECT_GT(cold->counters.cache_miss_blocks, 0u);
  const uint64_t blocks = cold->counters.cache_miss_blocks;
  client::StepCounters warm;
  ASSERT_TRUE(WaitUntil([&] {
    const auto attention = Staged(0, query);
    if (!attention.ok()) return true;
    warm = attention->counters;
    return warm.cache_miss_blocks == 0;
  }));
  EXPECT_EQ(warm.cache_hit_blocks, blocks);
}

TEST_P(StagedAttentionTest, DeadWavebufferdCostsTheStagedPathOnly) {
  SCOPED_TRACE(testing::Message() << "seed " << seed_);
  const std::vector<float> query = RandomQuery();
  const auto before = Staged(0, query);
  ASSERT_TRUE(before.ok()) << before.status();
  wavebufferd_->process().Kill();
  // The daemon goes on, and soon says what is missing.
  absl::Status status;
  ASSERT_TRUE(WaitUntil([&] {
    const auto staged = Staged(0, query);
    if (staged.ok()) {
      EXPECT_LT(MaxDifference(staged->out, before->out), kTolerance);
    }
    status = staged.status();
    return !status.ok();
  }));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  const auto served = Served(0, query);
  ASSERT_TRUE(served.ok()) << served.status();
  EXPECT_LT(MaxDifference(served->out, before->out), kTolerance);

  StartWavebufferd();
  absl::StatusOr<client::Attention> after = absl::UnknownError("not tried");
  ASSERT_TRUE(WaitUntil([&] {
    after = Staged(0, query);
    return after.ok();
  })) << after.status();
  EXPECT_LT(MaxDifference(after->out, before->out), kTolerance);
  EXPECT_LT(MaxDifference(after->lse, before->lse), kTolerance);
}

}  // namespace
}  // namespace wavekv
