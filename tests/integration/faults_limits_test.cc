// Faults of memory, limits and addresses (FAULTS rows 24, 25, 28 - 30) on real daemons.

#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <fstream>
#include <thread>

#include "sys/stat.h"
#include "tests/daemon_threads.h"
#include "tests/integration/raw_client.h"
#include "tests/integration/sdk_test.h"

namespace wavekv::integration {
namespace {

using std::chrono::seconds;

class FaultsLimitsTest : public SdkTest {};

// Row 24: threads multiplied with callers, and pinned to "core i". On one CPU, with 32 clients at
// once that insert, build and attend, the daemon works and its threads stay bounded.
TEST_F(FaultsLimitsTest, ThirtyTwoClientsOnOneCpu) {
  constexpr int kClients = 32;
  // Fewer than clients: the others go over gRPC.
  constexpr int kChannels = 8;
  // What one CPU's worth of workers, builders and lanes come to, with a margin, and a thread for
  // each channel; a thread per client, or per client and CPU, would pass it.
  constexpr int kOwnThreadsMax = 26 + kChannels;
  // And gRPC's pollers and timers.
  constexpr int kThreadsMax = 40 + kChannels;
  // On a machine of two; gRPC counts CPUs that it may not use.
  const int threads_max = kThreadsMax + GrpcThreadsOfMoreCpus();
  // With a wave buffer: its admissions and its lease, and what a GPU's driver keeps.
  constexpr int kWaveBufferThreads = 8;
  Start({.wave_buffer = false,
         .wavekvd_flags = {absl::StrCat("--data_channels_max=", kChannels)},
         .cpu = 0});
  std::vector<std::string> errors(kClients);
  std::vector<int> seen(kClients, 0), own_seen(kClients, 0);
  // Nobody ends before everybody has begun.
  std::barrier begun(kClients);
  std::vector<std::thread> clients;
  clients.reserve(kClients);
  for (int i = 0; i < kClients; ++i) {
    clients.emplace_back(
        [this, i, &begun, &error = errors[i], &most = seen[i], &own_most = own_seen[i]] {
          // Looks at the daemon's threads after each call, while the other clients work.
          const auto fail = [&](const absl::Status& status) {
            most = std::max(most, ThreadCount(daemons().wavekvd().pid()));
            own_most = std::max(own_most, OwnThreadCount(daemons().wavekvd().pid()));
            if (!status.ok() && error.empty()) error = status.ToString();
            return !status.ok();
          };
          client::ClientOptions options;
          options.address = daemons().address();
          options.deadline = seconds(100);
          auto session = client::Session::Connect(options);
          begun.arrive_and_wait();
          if (fail(session.status())) return;
          HostCache cache = HostCache::Random(Shape(), 1500, 240 + i);
          client::SequenceOptions sequence_options;
          sequence_options.shape = Shape();
          sequence_options.max_tokens = 1600;
          sequence_options.attach_wave_buffer = attach_wave_buffer_;
          auto sequence = (*session)->CreateSequence(sequence_options);
          if (fail(sequence.status())) return;
          const HostCache::Chunk chunk = cache.All();
          if (fail((*sequence)->Insert(0, chunk.layers, chunk.keys, chunk.values))) return;
          if (fail((*sequence)->BuildIndex().status())) return;
          const std::vector<float> queries = RandomQueries(Shape(), i);
          client::AttendOptions all;
          all.budget = client::Budget::Ratio(1.0);
          const auto attention = Attend(**sequence, 0, QueryTensor(Shape(), queries), all);
          if (fail(attention.status())) return;
          if (RelativeError(attention->out, cache.Attend(0, queries, 1500).out) > 1e-4) {
            error = "another client's answer";
          }
        });
  }
  for (std::thread& client : clients) client.join();
  const int threads_seen = *std::max_element(seen.begin(), seen.end());
  for (const std::string& error : errors) EXPECT_EQ(error, "");
  const int own_threads_seen = *std::max_element(own_seen.begin(), own_seen.end());
  const int more = daemons().has_wave_buffer() ? kWaveBufferThreads : 0;
  EXPECT_GT(own_threads_seen, 0);
  EXPECT_LE(own_threads_seen, kOwnThreadsMax + more);
  EXPECT_LE(threads_seen, threads_max + more);
}

// Row 25: all memory pinned by sequences, and one more wanted. It is refused at once, saying who
// holds what and which flag to change; what was there goes on; a drop makes room.
TEST_F(FaultsLimitsTest, AFullPoolRefusesAtOnce) {
  Start({.wave_buffer = false, .pool_bytes = 32ull << 20});
  std::vector<std::unique_ptr<client::Sequence>> held;
  absl::Status refused;
  const auto begin = std::chrono::steady_clock::now();
  while (held.size() < 1000) {
    auto sequence = Create(Shape(), 4096);
    refused = sequence.status();
    if (!refused.ok()) break;
    ASSERT_OK((*sequence)->Pin(true));
    held.push_back(std::move(sequence).value());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(30));
  ASSERT_FALSE(held.empty());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_NE(refused.message().find("--pool_bytes"), absl::string_view::npos) << refused;
  // Those that are there can be filled to their last token: their memory was promised.
  HostCache cache = HostCache::Random(Shape(), 4096, 25);
  const HostCache::Chunk chunk = cache.All();
  for (const auto& sequence : held) {
    ASSERT_OK(sequence->Insert(0, chunk.layers, chunk.keys, chunk.values));
    ASSERT_OK(sequence->BuildIndex().status());
  }
  const std::vector<float> row(2 * 64, 0.0f);
  client::AttendOptions append;
  append.append_keys = client::Tensor{DType::kF32, {2, 64}, row.data()};
  append.append_values = client::Tensor{DType::kF32, {2, 32}, row.data()};
  const std::vector<float> queries = RandomQueries(Shape(), 25);
  const auto beyond = Attend(*held[0], 0, QueryTensor(Shape(), queries), append);
  EXPECT_EQ(beyond.status().code(), absl::StatusCode::kResourceExhausted) << beyond.status();
  EXPECT_NE(beyond.status().message().find("max_tokens"), absl::string_view::npos)
      << beyond.status();
  ASSERT_OK(held.back()->Drop());
  held.pop_back();
  ASSERT_OK(Create(Shape(), 4096).status());
}

// Row 28: memory promised at start, the OOM killer later. More than the machine has is refused
// before anything is touched, with the cure.
TEST(FaultsStartTest, APoolLargerThanTheMachineIsRefused) {
  const TempDir directory;
  auto process =
      Process::Start({.argv = {ProgramPath("wavekvd"), "--listen=unix:" + directory.path() + "/s",
                               "--pool_bytes=64TiB"}});
  ASSERT_OK(process.status());
  const std::optional<int> code = (*process)->WaitForExit(seconds(30));
  ASSERT_TRUE(code.has_value());
  EXPECT_NE(*code, 0);
  EXPECT_LT(*code, 128) << "ended by a signal";
  EXPECT_TRUE((*process)->WaitForOutput("--pool_bytes", seconds(5))) << (*process)->Output();
  EXPECT_EQ((*process)->Output().find("event=ready"), std::string::npos);
}

struct InsertSizeRow {
  uint64_t mib_tenths;  // K and V of one Insert call, in tenths of a MiB.
  std::string why;
};

// Row 29: message caps. Inserts of any size work, because they are streams of messages that fit;
// what went in is there, to the last token.
TEST_F(FaultsLimitsTest, InsertsOfAnySizeWork) {
  ModelShape shape = Shape(DType::kBF16);
  shape.layer_count = 1;
  shape.query_head_count = shape.kv_head_count = 8;
  shape.key_dim = shape.value_dim = 128;  // 4 KiB a token.
  const InsertSizeRow rows[] = {
      {39, "just under gRPC's default limit"},
      {41, "just over it"},
      {650, "over the daemon's own limit for one message"},
      {6000, "many messages"},
  };
  Start({.wave_buffer = false, .pool_bytes = 2ull << 30});
  for (const InsertSizeRow& row : rows) {
    SCOPED_TRACE(row.why);
    const uint64_t tokens = row.mib_tenths * (1 << 20) / 10 / 4096;
    std::vector<uint16_t> keys(tokens * 8 * 128, FloatToBF16(0.0f));
    std::vector<uint16_t> values(keys.size(), FloatToBF16(0.0f));
    // Only the last token is found: its key is along every query.
    std::fill(keys.end() - 8 * 128, keys.end(), FloatToBF16(4.0f));
    std::fill(values.end() - 8 * 128, values.end(), FloatToBF16(3.0f));
    auto sequence = Create(shape, tokens);
    ASSERT_OK(sequence.status());
    const std::vector<int64_t> axes = {static_cast<int64_t>(tokens), 8, 128};
    const uint32_t layers[] = {0};
    ASSERT_OK((*sequence)->Insert(0, layers, {DType::kBF16, axes, keys.data()},
                                  {DType::kBF16, axes, values.data()}));
    EXPECT_EQ((*sequence)->token_count(), tokens);
    const std::vector<float> queries(8 * 128, 1.0f);
    // Not built: all rows are steady, more of them than there is room to stage.
    const auto attention = (*sequence)->Attend(0, QueryTensor(shape, queries));
    ASSERT_OK(attention.status());
    EXPECT_EQ(attention->token_count, tokens);
    for (const float x : attention->out) ASSERT_NEAR(x, 3.0f, 1e-2f);
    ASSERT_OK((*sequence)->Drop());
  }
}

// Row 29, the reply's side: rows of more than 4 MB come back inline.
TEST_F(FaultsLimitsTest, RepliesOverFourMegabytesArrive) {
  Start({.wave_buffer = false});
  HostCache cache = HostCache::Random(Shape(), 9000, 29);
  const auto sequence = CreateFilled(&cache);
  client::QueryOptions everything;
  everything.budget = client::Budget::Ratio(1.0);
  everything.inline_rows = true;
  const std::vector<float> queries = RandomQueries(Shape(), 29);
  const auto result = sequence->Query(0, QueryTensor(Shape(), queries), everything);
  ASSERT_OK(result.status());
  size_t bytes = 0;
  for (const auto& head : result->heads) {
    bytes += head.inline_keys.size() + head.inline_values.size();
  }
  EXPECT_EQ(bytes, 9000u * 2 * (64 + 32) * 4);
  EXPECT_GT(bytes, 4u << 20);
}

// Row 29: one message over the daemon's limit, as a client of another kind may send it. The error
// names the limit, and the daemon goes on.
TEST_F(FaultsLimitsTest, AnOversizedMessageIsRefusedByName) {
  Start({.wave_buffer = false, .wavekvd_flags = {"--message_bytes_max=8MiB"}});
  auto raw = RawClient::Attach(daemons().address());
  ASSERT_OK(raw.status());
  v1::InsertRequest request;
  request.mutable_keys()->set_data(std::string(9 << 20, 'x'));
  const auto refused = (*raw)->Insert(request);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_NE(refused.status().message().find("8388608"), absl::string_view::npos)
      << refused.status();
  // The SDK learns the limit at Attach and cuts its messages to fit.
  EXPECT_EQ(session().info().message_bytes_max, 8u << 20);
  HostCache cache = HostCache::Random(Shape(), 9000, 30);
  EXPECT_NE(CreateFilled(&cache), nullptr);
}

// Row 30: two servers on one address, silently. The second exits and names the address; the first
// goes on serving: on a socket,
TEST_F(FaultsLimitsTest, ASecondDaemonOnTheSocketIsRefused) {
  Start({.wave_buffer = false});
  auto second = Process::Start({.argv = daemons().WavekvdArgv()});
  ASSERT_OK(second.status());
  const std::optional<int> code = (*second)->WaitForExit(seconds(60));
  ASSERT_TRUE(code.has_value());
  EXPECT_NE(*code, 0);
  EXPECT_TRUE((*second)->WaitForOutput("wavekvd.sock", seconds(5))) << (*second)->Output();
  HostCache cache = HostCache::Random(Shape(), 100, 30);
  EXPECT_NE(CreateFilled(&cache), nullptr);
  EXPECT_NE(Connect(), nullptr) << "the socket's file must still be the first daemon's";
}

// and on a port.
TEST_F(FaultsLimitsTest, ASecondDaemonOnThePortIsRefused) {
  const TempDir directory;
  const std::string tokens = directory.path() + "/tokens";
  std::ofstream(tokens) << "a-token-of-sixteen-bytes tenant\n";
  ASSERT_EQ(chmod(tokens.c_str(), 0600), 0);
  Start({.wave_buffer = false,
         .wavekvd_flags = {"--listen_tcp=127.0.0.1:0", "--token_file=" + tokens}});
  const std::string address = daemons().tcp_address();
  auto second = Process::Start(
      {.argv = {ProgramPath("wavekvd"), "--listen=unix:" + directory.path() + "/other.sock",
                "--pool_bytes=64MiB", "--listen_tcp=" + address, "--token_file=" + tokens}});
  ASSERT_OK(second.status());
  const std::optional<int> code = (*second)->WaitForExit(seconds(60));
  ASSERT_TRUE(code.has_value());
  EXPECT_NE(*code, 0);
  EXPECT_TRUE((*second)->WaitForOutput(address, seconds(5))) << (*second)->Output();
  EXPECT_TRUE(RawClient::Attach(address, "a-token-of-sixteen-bytes").ok());
}

}  // namespace
}  // namespace wavekv::integration
