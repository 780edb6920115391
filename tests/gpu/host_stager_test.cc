#include "gpu/host_stager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "gpu/buffer_layout.h"
#include "gpu/descriptor_protocol.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/stage_rows.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

constexpr SequenceId kSequence{0x100000001};
constexpr char kTenant[] = "uid:0";

ModelShape Shape() {
  ModelShape shape;
  shape.layer_count = 2;
  shape.query_head_count = 4;
  shape.kv_head_count = 2;
  shape.key_dim = 64;
  shape.value_dim = 48;
  shape.dtype = DType::kBF16;
  shape.softmax_scale = 0.125f;
  return shape;
}

HostStagerOptions SmallOptions() {
  HostStagerOptions options;
  options.tenant_buffer_bytes = uint64_t{8} << 20;
  options.cache_bytes_min = 64 << 10;
  options.staging_tokens = 512;
  options.heartbeat_ms = 20;
  return options;
}

// What one process of a client sees: the tenant's buffer, mapped through a client's ticket.
absl::StatusOr<Mapping> MapAsClient(Stager* stager, const TenantId& tenant = kTenant) {
  absl::StatusOr<WaveBufferAccess> access = stager->Access(tenant, ::getuid());
  if (!access.ok()) return access.status();
  absl::StatusOr<UniqueFd> fd = FetchDescriptor(access->socket, access->ticket, kWait);
  if (!fd.ok()) return fd.status();
  return Mapping::Map(fd->get(), access->buffer_bytes, Mapping::kReadOnly);
}

class HostStagerTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(wavebufferd_.ready()) << wavebufferd_.process().output();
    Connect(SmallOptions());
  }
  void Connect(const HostStagerOptions& options) {
    stager_.reset();
    auto stager = ConnectWaveBuffer(wavebufferd_.address(), options);
    ASSERT_TRUE(stager.ok()) << stager.status();
    stager_ = *std::move(stager);
  }

  TempDir directory_;
  WavebufferdProcess wavebufferd_{directory_.path(), {"--bytes_max=64MiB", "--lease_ms=500"}};
  std::unique_ptr<Stager> stager_;
};

TEST_F(HostStagerTest, ClientReadsTheRowsItWasPromised) {
  const ModelShape shape = Shape();
  ASSERT_TRUE(stager_->AttachSequence(kTenant, kSequence, shape, 4096).ok());
  std::vector<StageHead> heads(shape.kv_head_count);
  for (uint32_t h = 0; h < heads.size(); ++h) {
    heads[h].kv_head = h;
    heads[h].steady.push_back(RunOf(std::make_shared<CodedRows>(shape, 10 + h, 0, 4), 0, 0));
    heads[h].steady.push_back(RunOf(std::make_shared<CodedRows>(shape, 10 + h, 900, 64), 0, 0));
    // 19 rows: two whole blocks and a partial one.
    heads[h].retrieved.push_back(
        RunOf(std::make_shared<CodedRows>(shape, 20 + h, 4, 19), 7 + h, 3));
    heads[h].retrieved.push_back(
        RunOf(std::make_shared<CodedRows>(shape, 30 + h, 50, 8), 7 + h, 9));
  }
  const auto step = stager_->Stage(kSequence, 1, 0, heads);
  ASSERT_TRUE(step.ok()) << step.status();
  const auto client = MapAsClient(stager_.get());
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(step->hit_blocks, 0u);
  EXPECT_EQ(step->miss_blocks, 8u);
  ASSERT_EQ(step->heads.size(), heads.size());
  for (size_t h = 0; h < heads.size(); ++h) {
    const StagedHead& staged = step->heads[h];
    EXPECT_EQ(staged.retrieved_runs, 2u);
    ASSERT_EQ(staged.retrieved.size(), 4u);  // One span per block.
    EXPECT_EQ(
        CompareSpans(shape, client->data(), client->bytes(), staged.steady, heads[h].steady, 2),
        "");
    EXPECT_EQ(CompareSpans(shape, client->data(), client->bytes(), staged.retrieved,
                           heads[h].retrieved, 2),
              "");
  }
}

}  // namespace
}  // namespace wavekv
