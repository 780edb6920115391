// The two ways of a call, shared memory and gRPC, against the real daemon: the same answers and
// errors, the SDK's own choice between them, and its change from one to the other.

#include <signal.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/integration/raw_client.h"
#include "tests/integration/sdk_test.h"

namespace wavekv::integration {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kTokens = 3000;

class DataPathTest : public SdkTest {
 protected:
  std::unique_ptr<client::Session> ConnectBy(bool shared_memory, milliseconds lease = {}) {
    auto session = client::Session::Connect({.address = daemons().address(),
                                             .client_name = "data_path_test",
                                             .deadline = seconds(20),
                                             .lease = lease,
                                             .shared_memory = shared_memory});
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *std::move(session) : nullptr;
  }
  // A sequence of `session` with kTokens tokens and its index built.
  std::unique_ptr<client::Sequence> Filled(client::Session& session, HostCache* cache) {
    auto sequence = session.CreateSequence(
        {.shape = Shape(), .max_tokens = kTokens + 64, .attach_wave_buffer = attach_wave_buffer_});
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    const HostCache::Chunk chunk = cache->All();
    EXPECT_TRUE((*sequence)->Insert(0, chunk.layers, chunk.keys, chunk.values).ok());
    EXPECT_TRUE((*sequence)->BuildIndex().ok());
    return *std::move(sequence);
  }
  static void ExpectSame(const absl::StatusOr<client::Attention>& a,
                         const absl::StatusOr<client::Attention>& b) {
    ASSERT_EQ(a.status(), b.status());
    if (!a.ok()) return;
    EXPECT_EQ(a->out, b->out);
    EXPECT_EQ(a->lse, b->lse);
    EXPECT_EQ(a->token_count, b->token_count);
    EXPECT_EQ(a->counters.kv_bytes_read, b->counters.kv_bytes_read);
    EXPECT_EQ(a->counters.retrieved_clusters, b->counters.retrieved_clusters);
  }
};

TEST_F(DataPathTest, TheSessionSaysWhichWayItTakes) {
  Start({.wave_buffer = false});
  EXPECT_TRUE(session().info().shared_memory) << session().info().shared_memory_absent;
  const auto forced = ConnectBy(false);
  EXPECT_FALSE(forced->info().shared_memory);
  EXPECT_NE(forced->info().shared_memory_absent.find("shared_memory is off"), std::string::npos);
  auto raw = RawClient::Attach(daemons().address());
  ASSERT_OK(raw.status());
  EXPECT_EQ((*raw)->Stats()->data_channels(), 1u);
}

// Equal numbers over both: every verb, both layouts, batches, every budget.
TEST_F(DataPathTest, BothWaysAnswerAlike) {
  Start({.wave_buffer = false});
  const auto other = ConnectBy(false);
  HostCache cache = HostCache::Random(Shape(), kTokens, 11);
  const auto shared = Filled(session(), &cache);
  const auto grpc = Filled(*other, &cache);
  const client::Budget budgets[] = {client::Budget(), client::Budget::Clusters(7),
                                    client::Budget::Coverage(0.6), client::Budget::Error(0.1),
                                    client::Budget::SteadyOnly()};
  uint64_t seed = 100;
  for (const client::Budget& budget : budgets) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const std::vector<float> queries = RandomQueries(Shape(), ++seed);
      const client::Tensor tensor = QueryTensor(Shape(), queries);
      ExpectSame(Attend(*shared, layer, tensor, {.budget = budget}),
                 Attend(*grpc, layer, tensor, {.budget = budget}));
      const auto a = shared->Query(layer, tensor, {.budget = budget, .inline_rows = true});
      const auto b = grpc->Query(layer, tensor, {.budget = budget, .inline_rows = true});
      ASSERT_OK(a.status());
      ASSERT_OK(b.status());
      ASSERT_EQ(a->heads.size(), b->heads.size());
      for (size_t head = 0; head < a->heads.size(); ++head) {
        EXPECT_EQ(a->heads[head].inline_positions, b->heads[head].inline_positions);
        EXPECT_EQ(a->heads[head].inline_keys, b->heads[head].inline_keys);
        EXPECT_EQ(a->heads[head].inline_values, b->heads[head].inline_values);
        EXPECT_EQ(a->heads[head].retrieved.size(), b->heads[head].retrieved.size());
      }
      EXPECT_EQ(a->estimation.out, b->estimation.out);
      const auto c = shared->Estimate(layer, tensor, budget);
      const auto d = grpc->Estimate(layer, tensor, budget);
      ASSERT_OK(c.status());
      ASSERT_OK(d.status());
      EXPECT_EQ(c->out, d->out);
      EXPECT_EQ(c->lse_upper, d->lse_upper);
      EXPECT_EQ(c->lse_lower, d->lse_lower);
    }
  }
}

// A refusal has one text, whichever way it came; only the id in it differs.
TEST_F(DataPathTest, BothWaysRefuseAlike) {
  Start({.wave_buffer = false});
  const auto other = ConnectBy(false);
  HostCache cache = HostCache::Random(Shape(), 100, 12);
  const client::SequenceOptions small = {
      .shape = Shape(), .max_tokens = 120, .attach_wave_buffer = attach_wave_buffer_};
  auto shared = session().CreateSequence(small);
  ASSERT_OK(shared.status());
  auto grpc = other->CreateSequence(small);
  ASSERT_OK(grpc.status());
  const HostCache::Chunk chunk = cache.All();
  std::vector<float> nan(2 * 2 * 64, 0.0f);
  nan[70] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> zeros(2 * 2 * 32, 0.0f);
  const std::vector<float> queries = RandomQueries(Shape(), 1);
  const uint32_t both[] = {0, 1};
  const auto text = [](const absl::Status& status, uint64_t id) {
    std::string found = status.ToString();
    const std::string number = absl::StrCat(id);
    const size_t at = found.find(number);
    return at == std::string::npos ? found : found.replace(at, number.size(), "N");
  };
  using Act = std::function<absl::Status(client::Sequence&)>;
  const Act acts[] = {
      [&](client::Sequence& s) { return s.Insert(50, chunk.layers, chunk.keys, chunk.values); },
      [&](client::Sequence& s) { return s.Insert(0, chunk.layers, chunk.keys, chunk.values); },
      [&](client::Sequence& s) { return s.Insert(60, chunk.layers, chunk.keys, chunk.values); },
      [&](client::Sequence& s) {
        return s.Insert(100, both, {DType::kF32, {2, 1, 2, 64}, nan.data()},
                        {DType::kF32, {2, 1, 2, 32}, zeros.data()});
      },
      [&](client::Sequence& s) { return s.Attend(0, QueryTensor(Shape(), nan)).status(); },
      [&](client::Sequence& s) {
        return s
            .Attend(0, QueryTensor(Shape(), queries), {.budget = client::Budget{.clusters_max = 5}})
            .status();
      },
      [&](client::Sequence& s) {
        (void)s.Drop();
        return s.Attend(0, QueryTensor(Shape(), queries)).status();
      },
  };
  for (size_t i = 0; i < std::size(acts); ++i) {
    EXPECT_EQ(text(acts[i](**shared), (*shared)->id()), text(acts[i](**grpc), (*grpc)->id())) << i;
  }
}

TEST_F(DataPathTest, WithoutADataPlaneEverythingGoesOverGrpc) {
  Start({.wave_buffer = false, .wavekvd_flags = {"--data_channels_max=0"}});
  EXPECT_FALSE(session().info().shared_memory);
  EXPECT_NE(session().info().shared_memory_absent.find("offers none"), std::string::npos);
  HostCache cache = HostCache::Random(Shape(), 200, 13);
  const auto sequence = CreateFilled(&cache);
  ASSERT_NE(sequence, nullptr);
  const std::vector<float> queries = RandomQueries(Shape(), 2);
  EXPECT_OK(Attend(*sequence, 0, QueryTensor(Shape(), queries)).status());
}

// The client that finds no room takes gRPC, and the channel once there is one.
TEST_F(DataPathTest, AClientWithoutAChannelGetsOneLater) {
  Start({.wave_buffer = false, .wavekvd_flags = {"--data_channels_max=1"}});
  ASSERT_TRUE(session().info().shared_memory);
  const auto late = ConnectBy(true, milliseconds(600));
  EXPECT_FALSE(late->info().shared_memory);
  EXPECT_NE(late->info().shared_memory_absent.find("--data_channels_max"), std::string::npos);
  auto sequence = late->CreateSequence(
      {.shape = Shape(), .max_tokens = 10, .attach_wave_buffer = attach_wave_buffer_});
  ASSERT_OK(sequence.status());
  const std::vector<float> queries = RandomQueries(Shape(), 3);
  EXPECT_OK(Attend(**sequence, 0, QueryTensor(Shape(), queries)).status());
  session_.reset();
  EXPECT_TRUE(Eventually([&] { return late->info().shared_memory; }));
  EXPECT_OK(Attend(**sequence, 0, QueryTensor(Shape(), queries)).status());
}

// A restart costs the channel; attaching again brings another.
TEST_F(DataPathTest, ARestartedDaemonGivesANewChannel) {
  Start({.wave_buffer = false});
  HostCache cache = HostCache::Random(Shape(), 100, 14);
  const auto old = CreateFilled(&cache);
  ASSERT_NE(old, nullptr);
  const std::vector<float> queries = RandomQueries(Shape(), 4);
  daemons().wavekvd().Signal(SIGKILL);
  ASSERT_TRUE(daemons().wavekvd().WaitForExit(seconds(30)).has_value());
  ASSERT_OK(daemons().RestartWavekvd());
  absl::Status status;
  EXPECT_TRUE(Eventually([&] {
    status = old->Attend(0, QueryTensor(Shape(), queries)).status();
    return absl::IsFailedPrecondition(status);
  })) << status;
  EXPECT_TRUE(Eventually([&] { return session().info().shared_memory; }))
      << session().info().shared_memory_absent;
  const auto fresh = CreateFilled(&cache);
  ASSERT_NE(fresh, nullptr);
  EXPECT_OK(Attend(*fresh, 0, QueryTensor(Shape(), queries)).status());
}

// An arena smaller than one insert, and than a query's inline rows: pieces, and gRPC for the rest.
TEST_F(DataPathTest, ASmallArenaIsEnough) {
  Start({.wave_buffer = false, .wavekvd_flags = {"--data_arena_bytes=1MiB"}});
  ASSERT_TRUE(session().info().shared_memory);
  HostCache cache = HostCache::Random(Shape(), kTokens, 15);
  const auto sequence = Filled(session(), &cache);
  const std::vector<float> queries = RandomQueries(Shape(), 5);
  const auto all = sequence->Query(0, QueryTensor(Shape(), queries),
                                   {.budget = client::Budget::Ratio(1.0), .inline_rows = true});
  ASSERT_OK(all.status());
  EXPECT_EQ(all->heads[0].inline_positions.size(), kTokens);
  EXPECT_OK(Attend(*sequence, 0, QueryTensor(Shape(), queries)).status());
}

// However large its answer: in the room that was guessed, in more, or in more than the arena has,
// where gRPC carries it. Steps of a sequence are numbered one after another.
TEST_F(DataPathTest, AQueryIsStagedOnce) {
  Start({.wavekvd_flags = {"--data_arena_bytes=1MiB"}});
  ASSERT_TRUE(session().info().shared_memory);
  attach_wave_buffer_ = true;
  HostCache cache = HostCache::Random(Shape(), kTokens, 16);
  const auto sequence = Filled(session(), &cache);
  const std::vector<float> queries = RandomQueries(Shape(), 7);
  uint64_t step = 0;
  for (const bool inline_rows : {false, true, false, true}) {
    for (const double ratio : {0.0, 0.2, 1.0, 0.1}) {
      const auto zones =
          sequence->Query(0, QueryTensor(Shape(), queries),
                          {.budget = client::Budget::Ratio(ratio), .inline_rows = inline_rows});
      ASSERT_OK(zones.status());
      EXPECT_EQ(zones->step, ++step) << "ratio " << ratio << (inline_rows ? ", inline" : "");
    }
  }
}

// Every insert keeps pieces under way, and together they would fill the arena several times over:
// none waits for room that another one's answered pieces take.
TEST_F(DataPathTest, ManyThreadsInsertThroughASmallArena) {
  Start({.wave_buffer = false, .wavekvd_flags = {"--data_arena_bytes=1MiB"}});
  ASSERT_TRUE(session().info().shared_memory);
  constexpr int kThreads = 12;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      HostCache cache = HostCache::Random(Shape(), kTokens, 100 + static_cast<uint64_t>(i));
      for (int round = 0; round < 3; ++round) {
        const auto sequence = Filled(session(), &cache);
        const std::vector<float> queries = RandomQueries(Shape(), 6);
        const auto answer = Attend(*sequence, 0, QueryTensor(Shape(), queries));
        EXPECT_TRUE(answer.ok()) << answer.status();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace wavekv::integration
