// The resident path on a real GPU, end to end: an engine's kernels attend and append in a region
// while wavekvd stores, clusters and publishes. Skipped without one.
#include <gmock/gmock.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "client/gpu/resident_batch.h"
#include "gpu/kernels/device_array.h"
#include "tests/gpu/driver/use_fake_cuda.h"
#include "tests/gpu/kernels/device_test.h"
#include "tests/gpu/kernels/head_problem.h"
#include "tests/integration/resident_engine.h"
#include "tests/integration/sdk_test.h"

namespace wavekv::integration {
namespace {

using gpu::DeviceArray;

constexpr uint64_t kFirst = 2500, kLast = 3200, kMaxTokens = 6000;
constexpr std::chrono::seconds kPatience(60);

class ResidentDeviceTest : public SdkTest {
 protected:
  void SetUp() override {
    if (UseFakeCuda()) GTEST_SKIP() << "needs a GPU and WAVEKV_TEST_GPU=1";
    ASSERT_TRUE(gpu::HasDevice());
    seed_ = gpu::TestSeed();
    RecordProperty("seed", std::to_string(seed_));
    Start({.backend = "cuda"});
    cache_ = std::make_unique<HostCache>(HostCache::Random(ResidentShape(), kLast, seed_));
    auto sequence = CreateResidentSequence(session(), cache_.get(), kFirst, kMaxTokens);
    ASSERT_OK(StatusOf(sequence));
    sequence_ = *std::move(sequence);
    const ModelShape shape = ResidentShape();
    // All clusters are retrieved: a step is exact.
    auto batch = client::ResidentBatch::Create({.layer_count = shape.layer_count,
                                                .kv_head_count = shape.kv_head_count,
                                                .group_size = shape.group_size(),
                                                .head_dim = shape.key_dim,
                                                .dtype = shape.dtype,
                                                .softmax_scale = shape.softmax_scale,
                                                .max_tokens = kMaxTokens,
                                                .retrieve_capacity = 2048});
    ASSERT_OK(StatusOf(batch));
    batch_ = *std::move(batch);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    const size_t layers = shape.layer_count, rows = layers * shape.query_head_count;
    queries_ = DeviceArray<uint16_t>::Make(rows * shape.key_dim).value();
    out_ = DeviceArray<uint16_t>::Make(rows * shape.key_dim).value();
    lse_ = DeviceArray<float>::Make(rows).value();
    keys_ = DeviceArray<uint16_t>::Make(layers * shape.kv_head_count * shape.key_dim).value();
    values_ = DeviceArray<uint16_t>::Make(keys_.size()).value();
  }
  void TearDown() override {
    batch_.reset();
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  void Attach() {
    auto attachment = sequence_->AttachResident(ResidentRegionOptions());
    ASSERT_OK(StatusOf(attachment));
    const auto open = batch_->Open(*attachment);
    ASSERT_OK(StatusOf(open));
    ASSERT_OK(batch_->SetSequence(0, *open, stream_));
  }

  absl::Status Launch() {
    const ModelShape shape = ResidentShape();
    absl::Status status = batch_->BeginToken(stream_);
    for (uint32_t layer = 0; layer < shape.layer_count && status.ok(); ++layer) {
      const size_t heads = size_t{layer} * shape.query_head_count;
      const size_t rows = size_t{layer} * shape.kv_head_count * shape.key_dim;
      status = batch_->Attend(layer,
                              {.queries = queries_.data() + heads * shape.key_dim,
                               .new_keys = keys_.data() + rows,
                               .new_values = values_.data() + rows,
                               .out = out_.data() + heads * shape.key_dim,
                               .lse = lse_.data() + heads},
                              stream_);
    }
    return status;
  }

  // Waits for the daemon where the ring is full.
  void Reserve() {
    while (batch_->RoomFor(0) == 0) {
      const auto state = sequence_->ResidentStatus(covered_, kPatience);
      ASSERT_OK(StatusOf(state));
      ASSERT_OK(state->attached);
      ASSERT_GT(state->steady_first, covered_) << "the ring stays full";
      covered_ = state->steady_first;
      batch_->NoteCovered(0, covered_);
    }
    ASSERT_OK(batch_->ReserveToken());
  }

  // The token at `position` and new queries, which are returned as the device sees them.
  std::vector<float> Upload(uint64_t position) {
    const ModelShape shape = ResidentShape();
    std::vector<float> queries = RandomQueries(shape, seed_ + position);
    std::vector<uint16_t> bits;
    for (float& x : queries) {
      bits.push_back(gpu::ToBits(gpu::Element::kBF16, x));
      x = gpu::FromBits(gpu::Element::kBF16, bits.back());
    }
    std::vector<uint16_t> all;  // The same ones for each layer.
    for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
      all.insert(all.end(), bits.begin(), bits.end());
    }
    EXPECT_OK(queries_.Upload(all));
    const HostCache::Chunk token = cache_->Slice(position, 1, 0, shape.layer_count);
    const auto upload = [](DeviceArray<uint16_t>* target, const client::Tensor& rows) {
      return target->Upload({static_cast<const uint16_t*>(rows.data), target->size()});
    };
    EXPECT_OK(upload(&keys_, token.keys));
    EXPECT_OK(upload(&values_, token.values));
    return queries;
  }

  void ExpectExact(const std::vector<float>& queries, uint64_t count) const {
    const ModelShape shape = ResidentShape();
    const std::vector<uint16_t> out = out_.Download().value();
    const std::vector<float> lse = lse_.Download().value();
    for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
      const HostCache::Exact exact = cache_->Attend(layer, queries, count);
      std::vector<float> found;
      const size_t heads = size_t{layer} * shape.query_head_count;
      for (size_t i = 0; i < exact.out.size(); ++i) {
        found.push_back(gpu::FromBits(gpu::Element::kBF16, out[heads * shape.key_dim + i]));
      }
      // bf16 weights and outputs, as in the step's own test.
      ASSERT_LT(RelativeError(found, exact.out), 5e-3) << "layer " << layer << " at " << count;
      for (size_t h = 0; h < exact.lse.size(); ++h) {
        ASSERT_NEAR(lse[heads + h], exact.lse[h], 2e-3) << "layer " << layer << " at " << count;
      }
    }
  }

  // Decodes from kFirst to kLast, by calls or by launches of a captured graph.
  void Decode(bool captured) {
    cudaGraphExec_t graph = nullptr;
    if (captured) {
      cudaGraph_t made;
      ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      ASSERT_OK(Launch());
      ASSERT_EQ(cudaStreamEndCapture(stream_, &made), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&graph, made, 0), cudaSuccess);
      ASSERT_EQ(cudaGraphDestroy(made), cudaSuccess);
    }
    for (uint64_t position = kFirst; position < kLast; ++position) {
      Reserve();
      if (HasFatalFailure()) return;
      const std::vector<float> queries = Upload(position);
      if (captured) {
        ASSERT_EQ(cudaGraphLaunch(graph, stream_), cudaSuccess);
      } else {
        ASSERT_OK(Launch());
      }
      ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      ASSERT_EQ(batch_->OutcomeOf(0), client::ResidentOutcome::kAttending) << position;
      if (position % 11 == 0 || position + 1 == kLast) ExpectExact(queries, position + 1);
      if (HasFatalFailure()) return;
    }
    if (captured) {
      ASSERT_EQ(cudaGraphExecDestroy(graph), cudaSuccess);
    }
  }

  // What the daemon counted, and what it stored once the attachment has ended.
  void ExpectStored() {
    const auto state = sequence_->ResidentStatus();
    ASSERT_OK(StatusOf(state));
    EXPECT_OK(state->attached);
    EXPECT_EQ(state->overflows, 0u);
    EXPECT_EQ(state->violations, 0u);
    EXPECT_GT(state->hit_blocks, 0u);
    EXPECT_GT(covered_, kFirst) << "no version came";
    ASSERT_OK(batch_->SetSequence(0, nullptr, stream_));
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    ASSERT_OK(sequence_->DetachResident());
    const std::vector<float> queries = RandomQueries(ResidentShape(), seed_);
    for (uint32_t layer = 0; layer < ResidentShape().layer_count; ++layer) {
      const auto attention =
          sequence_->Attend(layer, QueryTensor(ResidentShape(), queries), {.exact = true});
      ASSERT_OK(StatusOf(attention));
      EXPECT_EQ(attention->token_count, kLast);
      EXPECT_LT(RelativeError(attention->out, cache_->Attend(layer, queries, kLast).out), 1e-4);
    }
  }

  uint64_t seed_ = 0;
  std::unique_ptr<HostCache> cache_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::ResidentBatch> batch_;
  cudaStream_t stream_ = nullptr;
  uint64_t covered_ = 0;  // As the daemon said last.
  DeviceArray<uint16_t> queries_, keys_, values_, out_;
  DeviceArray<float> lse_;
};

TEST_F(ResidentDeviceTest, KernelsAttendAndAppendWhileVersionsMove) {
  Attach();
  if (!HasFatalFailure()) Decode(false);
  if (!HasFatalFailure()) ExpectStored();
}

TEST_F(ResidentDeviceTest, ACapturedTokenSeesNewVersions) {
  Attach();
  if (!HasFatalFailure()) Decode(true);
  if (!HasFatalFailure()) ExpectStored();
}

// What comes after the daemon has closed the region is nothing, and no error of CUDA's.
TEST_F(ResidentDeviceTest, DetachedIsAttendedToNoMore) {
  Attach();
  if (HasFatalFailure()) return;
  ASSERT_OK(sequence_->DetachResident());
  Upload(kFirst);
  ASSERT_OK(Launch());
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  // Closed, or wiped already.
  EXPECT_THAT(batch_->OutcomeOf(0), testing::AnyOf(client::ResidentOutcome::kClosed,
                                                   client::ResidentOutcome::kMalformed));
  const std::vector<float> lse = lse_.Download().value();
  EXPECT_THAT(lse, testing::Each(-HUGE_VALF));
}

}  // namespace
}  // namespace wavekv::integration
