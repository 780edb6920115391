#include "gpu/buffer_stager.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gpu/buffer_layout.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/stage_rows.h"
#include "tests/gpu/test_backend.h"

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

BufferStagerOptions SmallOptions() {
  BufferStagerOptions options;
  options.tenant_buffer_bytes = uint64_t{8} << 20;
  options.cache_bytes_min = 64 << 10;
  options.staging_tokens = 512;
  options.heartbeat_ms = 20;
  return options;
}

constexpr uint64_t kLentBytes = uint64_t{64} << 20;

// What one process of a client sees: the tenant's buffer, through a client's ticket.
absl::StatusOr<ClientView> MapAsClient(Stager* stager, const TenantId& tenant = kTenant) {
  absl::StatusOr<WaveBufferAccess> access = stager->Access(tenant, ::getuid());
  if (!access.ok()) return access.status();
  return ClientView::Open(*access);
}

class BufferStagerTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(wavebufferd_.ready()) << wavebufferd_.process().output();
    Connect(SmallOptions());
  }
  void Connect(const BufferStagerOptions& options) {
    stager_.reset();
    auto stager = ConnectWaveBuffer(wavebufferd_.address(), options);
    ASSERT_TRUE(stager.ok()) << stager.status();
    stager_ = *std::move(stager);
  }

  const TestBackend backend_{GetParam()};
  TempDir directory_;
  WavebufferdProcess wavebufferd_{directory_.path(), backend_.Flags(kLentBytes)};
  std::unique_ptr<Stager> stager_;
};

INSTANTIATE_TEST_SUITE_P(Backends, BufferStagerTest, ::testing::Values("host", "cuda"),
                         [](const auto& info) { return info.param; });

// What only memfds can promise.
using BufferStagerHostTest = BufferStagerTest;
INSTANTIATE_TEST_SUITE_P(Backends, BufferStagerHostTest, ::testing::Values("host"),
                         [](const auto& info) { return info.param; });

TEST_P(BufferStagerTest, ClientReadsTheRowsItWasPromised) {
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

// Heads whose retrieved runs are clusters `first` ... `first + count - 1` of a fixed segment.
std::vector<StageHead> HeadsOf(const ModelShape& shape, uint32_t first, uint32_t count,
                               uint32_t steady_rows = 4) {
  std::vector<StageHead> heads(shape.kv_head_count);
  for (uint32_t h = 0; h < heads.size(); ++h) {
    heads[h].kv_head = h;
    heads[h].steady.push_back(
        RunOf(std::make_shared<CodedRows>(shape, 99 + h, 0, steady_rows), 0, 0));
    for (uint32_t c = first; c < first + count; ++c) {
      heads[h].retrieved.push_back(
          RunOf(std::make_shared<CodedRows>(shape, 1000 * h + c, 16 * c, 16), 500 + h, 2 * c));
    }
  }
  return heads;
}

TEST_P(BufferStagerTest, WorkingSetWarmsUp) {
  const ModelShape shape = Shape();
  ASSERT_TRUE(stager_->AttachSequence(kTenant, kSequence, shape, 4096).ok());
  const std::vector<StageHead> heads = HeadsOf(shape, 0, 6);
  const auto cold = stager_->Stage(kSequence, 0, 0, heads);
  ASSERT_TRUE(cold.ok()) << cold.status();
  EXPECT_EQ(cold->hit_blocks, 0u);
  EXPECT_EQ(cold->miss_blocks, 24u);
  ASSERT_TRUE(WaitUntil([this] { return stager_->Status()[0].admitted_blocks == 24; }));
  const auto warm = stager_->Stage(kSequence, 0, cold->step, heads);
  ASSERT_TRUE(warm.ok()) << warm.status();
  EXPECT_EQ(warm->hit_blocks, 24u);
  EXPECT_EQ(warm->miss_blocks, 0u);
  const auto client = MapAsClient(stager_.get());
  ASSERT_TRUE(client.ok()) << client.status();
  for (size_t h = 0; h < heads.size(); ++h) {
    EXPECT_EQ(CompareSpans(shape, client->data(), client->bytes(), warm->heads[h].retrieved,
                           heads[h].retrieved, 6),
              "");
  }
  const WaveBufferStatus status = stager_->Status()[0];
  EXPECT_EQ(status.hit_blocks, 24u);
  EXPECT_EQ(status.miss_blocks, 24u);
  EXPECT_EQ(status.backend, GetParam());
  EXPECT_TRUE(status.connected);
  EXPECT_EQ(status.pinned, backend_.cuda());
  EXPECT_EQ(status.bytes_max, backend_.LimitFor(kLentBytes));
}

TEST_P(BufferStagerTest, TouchWarmsUpToo) {
  const ModelShape shape = Shape();
  ASSERT_TRUE(stager_->AttachSequence(kTenant, kSequence, shape, 4096).ok());
  const std::vector<StageHead> heads = HeadsOf(shape, 0, 3);
  ASSERT_EQ(stager_->Touch(kSequence, 0, heads)->miss_blocks, 12u);
  ASSERT_TRUE(WaitUntil([this] { return stager_->Status()[0].admitted_blocks == 12; }));
  EXPECT_EQ(stager_->Touch(kSequence, 0, heads)->hit_blocks, 12u);
}

// Layers and sequences share nothing: what one stages, another's step does not disturb.
TEST_P(BufferStagerTest, SequencesDoNotMix) {
  const ModelShape shape = Shape();
  const SequenceId other(kSequence.value() + 1);
  ASSERT_TRUE(stager_->AttachSequence(kTenant, kSequence, shape, 4096).ok());
  ASSERT_TRUE(stager_->AttachSequence(kTenant, other, shape, 4096).ok());
  const std::vector<StageHead> mine = HeadsOf(shape, 0, 4);
  const std::vector<StageHead> theirs = HeadsOf(shape, 50, 4);
  const auto first = stager_->Stage(kSequence, 0, 0, mine);
  const auto second = stager_->Stage(other, 0, 0, theirs);
  const auto third = stager_->Stage(kSequence, 1, 0, theirs);
  ASSERT_TRUE(first.ok() && second.ok() && third.ok());
  const auto both = MapAsClient(stager_.get());
  ASSERT_TRUE(both.ok()) << both.status();
  for (size_t h = 0; h < theirs.size(); ++h) {
    EXPECT_EQ(CompareSpans(shape, both->data(), both->bytes(), second->heads[h].retrieved,
                           theirs[h].retrieved, 4),
              "");
  }
  stager_->DetachSequence(other);
  const auto client = MapAsClient(stager_.get());
  ASSERT_TRUE(client.ok()) << client.status();
  for (size_t h = 0; h < mine.size(); ++h) {
    EXPECT_EQ(CompareSpans(shape, client->data(), client->bytes(), first->heads[h].retrieved,
                           mine[h].retrieved, 4),
              "");
    EXPECT_EQ(CompareSpans(shape, client->data(), client->bytes(), third->heads[h].retrieved,
                           theirs[h].retrieved, 4),
              "");
  }
  EXPECT_EQ(stager_->Stage(other, 0, 0, theirs).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(BufferStagerTest, TenantsHaveBuffersOfTheirOwn) {
  const ModelShape shape = Shape();
  ASSERT_TRUE(stager_->AttachSequence("alice", kSequence, shape, 4096).ok());
  const auto step = stager_->Stage(kSequence, 0, 0, HeadsOf(shape, 0, 4));
  ASSERT_TRUE(step.ok()) << step.status();
  const auto bob = MapAsClient(stager_.get(), "bob");
  ASSERT_TRUE(bob.ok()) << bob.status();
  const uint64_t rows_begin = 2 * kBufferPageBytes;  // All of it but header and directory.
  const auto zero = [](std::byte byte) { return byte == std::byte{0}; };
  EXPECT_TRUE(std::all_of(bob->data() + rows_begin + 1024 * sizeof(DirectoryEntry),
                          bob->data() + bob->bytes(), zero));
}

TEST_P(BufferStagerTest, RegionsComeBackWhenSequencesGo) {
  const ModelShape shape = Shape();
  for (uint64_t i = 0; i < 200; ++i) {  // Far more than fit at a time.
    const SequenceId sequence(kSequence.value() + i);
    const absl::Status attached = stager_->AttachSequence(kTenant, sequence, shape, 4096);
    ASSERT_TRUE(attached.ok()) << attached;
    ASSERT_TRUE(stager_->Stage(sequence, 0, 0, HeadsOf(shape, 0, 4)).ok());
    stager_->DetachSequence(sequence);
    stager_->DetachSequence(sequence);  // Unknown by now.
  }
}

TEST_P(BufferStagerTest, FullBufferNamesSizeAndFlags) {
  const ModelShape shape = Shape();
  absl::Status status;
  uint64_t attached = 0;
  while (status.ok() && attached < 1000) {
    status =
        stager_->AttachSequence(kTenant, SequenceId(kSequence.value() + attached), shape, 4096);
    attached += status.ok();
  }
  EXPECT_GT(attached, 4u);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("--wave_buffer_bytes"), HasSubstr("8388608")));
  // The one that was refused is unknown, the others go on.
  EXPECT_EQ(stager_->Touch(SequenceId(kSequence.value() + attached), 0, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(stager_->Stage(kSequence, 0, 0, HeadsOf(shape, 0, 1)).ok());
}

TEST_P(BufferStagerTest, AttachingTwiceIsRefused) {
  ASSERT_TRUE(stager_->AttachSequence(kTenant, kSequence, Shape(), 4096).ok());
  EXPECT_EQ(stager_->AttachSequence(kTenant, kSequence, Shape(), 4096).code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(stager_->Touch(kSequence, 0, {}).ok());
}

TEST_P(BufferStagerTest, TenantOverTheLimitIsRefused) {
  BufferStagerOptions options = SmallOptions();
  options.tenant_buffer_bytes = uint64_t{40} << 20;
  Connect(options);
  ASSERT_TRUE(stager_->AttachSequence("alice", kSequence, Shape(), 4096).ok());
  const auto bob = stager_->Access("bob", ::getuid());
  EXPECT_EQ(bob.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(bob.status().message()),
              testing::AllOf(HasSubstr("--bytes_max"), HasSubstr("alice holds 41943040")));
}

// A tenant that has no sequence keeps nobody else out.
TEST_P(BufferStagerTest, IdleBuffersMakeRoomForOthers) {
  BufferStagerOptions options = SmallOptions();
  options.tenant_buffer_bytes = uint64_t{40} << 20;
  Connect(options);
  const auto first = stager_->Access("alice", ::getuid());
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_TRUE(stager_->AttachSequence("bob", kSequence, Shape(), 4096).ok());
  EXPECT_EQ(FetchDescriptor(first->socket, first->ticket, kWait).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(stager_->Access("alice", ::getuid()).status().code(),
            absl::StatusCode::kResourceExhausted);
  stager_->DetachSequence(kSequence);
  const auto again = MapAsClient(stager_.get(), "alice");
  EXPECT_TRUE(again.ok()) << again.status();
}

TEST_P(BufferStagerTest, LongSequenceGetsASmallerShareRatherThanNone) {
  BufferStagerOptions options = SmallOptions();
  Connect(options);
  // 5 % of its payload alone are more than the whole buffer.
  const absl::Status attached = stager_->AttachSequence(kTenant, kSequence, Shape(), 1 << 20);
  ASSERT_TRUE(attached.ok()) << attached;
  EXPECT_TRUE(stager_->Stage(kSequence, 0, 0, HeadsOf(Shape(), 0, 4)).ok());
}

TEST_P(BufferStagerHostTest, ClientMapsReadOnly) {
  const auto access = stager_->Access(kTenant, ::getuid());
  ASSERT_TRUE(access.ok()) << access.status();
  const auto fd = FetchDescriptor(access->socket, access->ticket, kWait);
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(Mapping::Map(fd->get(), access->buffer_bytes, Mapping::kReadWrite).status().code(),
            absl::StatusCode::kPermissionDenied);
  // Nor through a new descriptor of the same memory, which the seal is there for.
  const std::string path = "/proc/self/fd/" + std::to_string(fd->get());
  const UniqueFd reopened(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (reopened.valid()) {
    EXPECT_EQ(
        Mapping::Map(reopened.get(), access->buffer_bytes, Mapping::kReadWrite).status().code(),
        absl::StatusCode::kPermissionDenied);
    EXPECT_LT(::pwrite(reopened.get(), "x", 1, 0), 0);
  }
  EXPECT_NE(::ftruncate(fd->get(), 1), 0);
}

TEST_P(BufferStagerTest, DeadWavebufferdIsUnavailableAndComesBackCold) {
  const ModelShape shape = Shape();
  ASSERT_TRUE(stager_->AttachSequence(kTenant, kSequence, shape, 4096).ok());
  const std::vector<StageHead> heads = HeadsOf(shape, 0, 4);
  auto before = stager_->Stage(kSequence, 0, 0, heads);
  ASSERT_TRUE(before.ok()) << before.status();
  auto old_client = MapAsClient(stager_.get());
  ASSERT_TRUE(old_client.ok()) << old_client.status();

  wavebufferd_.process().Kill();
  absl::Status status;
  ASSERT_TRUE(WaitUntil([&] {
    auto step = stager_->Stage(kSequence, 0, before->step, heads);
    status = step.status();
    if (step.ok()) before = std::move(step);  // It has not been noticed yet, and does no harm.
    return !status.ok();
  }));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(wavebufferd_.address()));
  EXPECT_EQ(stager_->Access(kTenant, 0).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(stager_->AttachSequence(kTenant, SequenceId(5), shape, 64).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_FALSE(stager_->Status()[0].connected);
  // What the client maps is its own: still there, rows and all.
  EXPECT_EQ(CompareSpans(shape, old_client->data(), old_client->bytes(), before->heads[0].retrieved,
                         heads[0].retrieved, 4),
            "");

  WavebufferdProcess again(directory_.path(), backend_.Flags(kLentBytes));
  ASSERT_TRUE(again.ready()) << again.process().output();
  absl::StatusOr<StagedStep> after;
  ASSERT_TRUE(WaitUntil([&] {
    after = stager_->Stage(kSequence, 0, before->step, heads);
    return after.ok();
  })) << after.status();
  EXPECT_GT(after->step, before->step);  // So that nobody takes the old buffer for the new one.
  EXPECT_EQ(after->hit_blocks, 0u);      // Cold.
  const auto new_client = MapAsClient(stager_.get());
  ASSERT_TRUE(new_client.ok()) << new_client.status();
  for (size_t h = 0; h < heads.size(); ++h) {
    EXPECT_EQ(CompareSpans(shape, new_client->data(), new_client->bytes(),
                           after->heads[h].retrieved, heads[h].retrieved, 4),
              "");
  }
  ASSERT_TRUE(old_client->Refresh().ok());
  const auto* old_header = reinterpret_cast<const BufferHeader*>(old_client->data());
  EXPECT_EQ(old_header->state.load(), kBufferClosed);
}

TEST_P(BufferStagerTest, ManyThreadsOneBuffer) {
  const ModelShape shape = Shape();
  constexpr uint64_t kThreads = 4;
  const int rounds = backend_.cuda() ? 3 : 10;  // Looking at a device's buffer copies all of it.
  std::vector<std::string> failures(kThreads);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const SequenceId sequence(100 + t);
      for (int round = 0; round < rounds && failures[t].empty(); ++round) {
        const absl::Status attached = stager_->AttachSequence(kTenant, sequence, shape, 256);
        if (!attached.ok()) failures[t] = attached.ToString();
        auto client = MapAsClient(stager_.get());
        if (!client.ok()) failures[t] = client.status().ToString();
        uint64_t completed = 0;
        for (uint32_t i = 0; i < 20 && failures[t].empty(); ++i) {
          const auto heads = HeadsOf(shape, static_cast<uint32_t>(t * 40 + i), 3);
          const auto step = stager_->Stage(sequence, 0, completed, heads);
          if (!step.ok()) {
            failures[t] = step.status().ToString();
            break;
          }
          if (const absl::Status read = client->Refresh(); !read.ok()) {
            failures[t] = read.ToString();
          }
          for (size_t h = 0; h < heads.size() && failures[t].empty(); ++h) {
            failures[t] = CompareSpans(shape, client->data(), client->bytes(),
                                       step->heads[h].retrieved, heads[h].retrieved, 3);
          }
          completed = step->step;
        }
        stager_->DetachSequence(sequence);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(failures, testing::Each(""));
}

TEST(ConnectWaveBufferTest, AbsentWavebufferdIsNoError) {
  const TempDir directory;
  auto stager = ConnectWaveBuffer("unix:" + directory.path() + "/wavebufferd.sock", SmallOptions());
  ASSERT_TRUE(stager.ok()) << stager.status();
  EXPECT_EQ((*stager)->Access(kTenant, 0).status().code(), absl::StatusCode::kUnavailable);
  const WavebufferdProcess late(directory.path(), {"--bytes_max=64MiB"});
  ASSERT_TRUE(late.ready());
  EXPECT_TRUE(WaitUntil([&stager] { return (*stager)->Access(kTenant, 0).ok(); }));
}

TEST(ConnectWaveBufferTest, BadArgumentsAreNamed) {
  struct Row {
    std::string address;
    BufferStagerOptions options;
    std::string names;
  };
  const auto with = [](auto change) {
    BufferStagerOptions options = SmallOptions();
    change(&options);
    return options;
  };
  const Row rows[] = {
      {"127.0.0.1:7070", SmallOptions(), "unix:/path"},
      {"wavebufferd.sock", SmallOptions(), "wavebufferd.sock"},
      {"unix:/x", with([](auto* o) { o->cache_ratio = 1.5; }), "--wave_buffer_cache_ratio is 1.5"},
      {"unix:/x", with([](auto* o) { o->cache_ratio = 0.0 / 0.0; }), "--wave_buffer_cache_ratio"},
      {"unix:/x", with([](auto* o) { o->staging_tokens = 0; }),
       "--wave_buffer_staging_tokens is 0"},
      {"unix:/x", with([](auto* o) { o->tenant_buffer_bytes = 1; }), "--wave_buffer_bytes is 1"},
      {"unix:/x", with([](auto* o) { o->cache_bytes_max = 1; }), "cache_bytes_max"},
      {"unix:/x", with([](auto* o) { o->regions_max = 0; }), "regions_max"},
      {"unix:/x", with([](auto* o) { o->heartbeat_ms = 0; }), "heartbeat_ms"},
  };
  for (const Row& row : rows) {
    const auto stager = ConnectWaveBuffer(row.address, row.options);
    EXPECT_EQ(stager.status().code(), absl::StatusCode::kInvalidArgument) << row.names;
    EXPECT_THAT(std::string(stager.status().message()), HasSubstr(row.names));
  }
}

}  // namespace
}  // namespace wavekv
