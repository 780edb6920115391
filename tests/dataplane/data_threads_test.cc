// 32 clients at once, each with a sequence of its own: right answers, a bounded number of threads
// (FAULTS 24). Under ThreadSanitizer this is the data plane's race test.
#include <dirent.h>
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include "tests/dataplane/data_fixture.h"

namespace wavekv::testing {
namespace {

constexpr int kClients = 32;
constexpr uint64_t kPrefill = 300;
constexpr uint64_t kSteps = 24;

int Threads() {
  DIR* const directory = ::opendir("/proc/self/task");
  int count = -2;  // "." and ".."
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

class DataThreadsTest : public DataPlaneTest {
 protected:
  // Prefill, then decode steps, each answer compared with float64.
  void RunClient(int client, uint64_t seed) {
    DataPeer peer = Connect(static_cast<uint8_t>(client + 1));
    const SequenceRef sequence =
        Create(SmallSpec(1024), kTenant, ClientId(static_cast<uint64_t>(client) + 1));
    const TokenData data(shape(), kPrefill + kSteps, seed);
    const ChunkBuffers prefill(data, sequence, {0, 1}, 0, kPrefill);
    ASSERT_TRUE(peer.Insert(prefill.chunk).ok());
    const int64_t key_shape[] = {2, 32};
    const int64_t value_shape[] = {2, 48};
    for (uint64_t step = 0; step < kSteps; ++step) {
      const auto layer = static_cast<uint32_t>(step % 2);
      const uint64_t position = kPrefill + step / 2;
      const QueryBuffers query(shape(), sequence, layer, RandomQueries(shape(), seed + step));
      const ChunkBuffers token(data, sequence, {layer}, position, 1);
      shm::AttendItemRequest item;
      item.query = ToRequest(query.query);
      item.append_keys =
          shm::TensorRef{.dtype = DType::kBF16, .shape = key_shape, .data = token.keys};
      item.append_values =
          shm::TensorRef{.dtype = DType::kBF16, .shape = value_shape, .data = token.values};
      item.append_position = position;
      item.exact = true;
      const DataAttention found = peer.Attend(item);
      ASSERT_TRUE(found.status.ok()) << found.status;
      ASSERT_EQ(found.token_count, position + 1);
      const OracleAnswer exact = ExactOracle(data, layer, position + 1, query.vectors);
      ASSERT_LT(RelativeError(shape(), found.out, exact.out), 1e-3);
    }
  }
};

TEST_F(DataThreadsTest, ThirtyTwoClients) {
  const uint64_t seed = FreshSeed();
  const int threads_before = Threads();
  std::atomic<int> threads_max{0};
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([this, client, seed, &threads_max] {
      RunClient(client, seed + static_cast<uint64_t>(client) * 1000);
      int seen = threads_max.load();
      const int now = Threads();
      while (now > seen && !threads_max.compare_exchange_weak(seen, now)) {
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_LE(threads_max.load(), threads_before + 2 * kClients) << "a thread a client, no more";
  EXPECT_TRUE(BecomesIdle());
  EXPECT_EQ(clients_.running.load(), 0);
}

// As many, which come, call and leave in the middle; some of them are thrown out.
TEST_F(DataThreadsTest, ClientsThatComeAndGo) {
  const uint64_t seed = FreshSeed();
  std::vector<std::thread> clients;
  for (int client = 0; client < kClients; ++client) {
    clients.emplace_back([this, client, seed] {
      std::mt19937_64 random(seed + static_cast<uint64_t>(client));
      for (int round = 0; round < 6; ++round) {
        DataPeer peer = Connect(static_cast<uint8_t>(client + 1));
        const SequenceRef sequence = Create(SmallSpec(64));
        const TokenData data(shape(), 32, seed);
        const ChunkBuffers chunk(data, sequence, {0, 1}, 0, 32);
        if (random() % 4 == 0) plane_->Drop(ClientId(static_cast<uint64_t>(client) + 1));
        const absl::Status inserted = peer.Insert(chunk.chunk);
        EXPECT_TRUE(inserted.ok() || absl::IsUnavailable(inserted)) << inserted;
        if (random() % 2 == 0) {
          EXPECT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
        }
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(BecomesIdle());
  EXPECT_EQ(clients_.running.load(), 0);
}

}  // namespace
}  // namespace wavekv::testing
