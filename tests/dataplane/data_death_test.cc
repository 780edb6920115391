// Clients that go, hang or are thrown out: what they held comes back at once, and nobody else
// notices (FAULTS 1, 2, 7, 9, 26).
#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <random>
#include <string>

#include "tests/dataplane/data_fixture.h"

namespace wavekv::testing {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

int CountEntries(const char* path) {
  DIR* const directory = ::opendir(path);
  int count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}
int Descriptors() { return CountEntries("/proc/self/fd"); }
int Threads() { return CountEntries("/proc/self/task"); }

// Mappings of channels of this process.
int ChannelMappings() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("wavekv-data-") != std::string::npos) ++count;
  }
  return count;
}

class DataDeathTest : public DataPlaneTest {
 protected:
  // `done` within a minute.
  template <class Done>
  static bool Eventually(Done done) {
    const auto deadline = steady_clock::now() + seconds(60);
    while (steady_clock::now() < deadline) {
      if (done()) return true;
      std::this_thread::yield();
    }
    return false;
  }
};

TEST_F(DataDeathTest, ClientsThatCloseLeaveNothing) {
  { const DataPeer warm = Connect(200); }
  ASSERT_TRUE(BecomesIdle());
  ASSERT_EQ(ChannelMappings(), 0);
  const int descriptors = Descriptors();
  for (int round = 0; round < 20; ++round) {
    DataPeer first = Connect(1);
    const DataPeer second = Connect(2);
    // Those of the round before may be on their way out.
    EXPECT_TRUE(Eventually([this] { return plane_->channel_count() == 2; }));
  }
  ASSERT_TRUE(BecomesIdle());
  EXPECT_EQ(ChannelMappings(), 0);
  EXPECT_TRUE(Eventually([descriptors] { return Descriptors() <= descriptors; })) << Descriptors();
}

// Killed before its first call: the arena it had is gone, whatever its lease.
TEST_F(DataDeathTest, AKilledProcessCostsNothingAtOnce) {
  StartPlane({.arena_bytes = 1ull << 30});
  const int threads = Threads();
  for (int round = 0; round < 20; ++round) {
    int ready[2];
    ASSERT_EQ(::pipe(ready), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      // Only calls that are safe after a fork of a process with threads.
      auto channel = TryConnect({.version = 1, .epoch = 1, .secret = FakeClients::SecretOf(5)});
      const char ok = channel.ok() ? 1 : 0;
      (void)!::write(ready[1], &ok, 1);
      ::pause();
      ::_exit(0);
    }
    char ok = 0;
    ASSERT_EQ(::read(ready[0], &ok, 1), 1);
    EXPECT_EQ(ok, 1);
    EXPECT_EQ(plane_->channel_count(), 1u);
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::close(ready[0]);
    ::close(ready[1]);
    ASSERT_TRUE(BecomesIdle()) << "round " << round;
  }
  EXPECT_EQ(ChannelMappings(), 0);
  EXPECT_TRUE(Eventually([threads] { return Threads() <= threads + 1; })) << "one husk may remain";
}

// A forked child keeps the socket open: the process itself is watched as well.
TEST_F(DataDeathTest, AForkedChildDoesNotKeepADeadClientsChannel) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t client = ::fork();
  if (client == 0) {
    auto channel = TryConnect({.version = 1, .epoch = 1, .secret = FakeClients::SecretOf(6)});
    const pid_t heir = ::fork();
    if (heir == 0) {
      ::pause();
      ::_exit(0);
    }
    (void)!::write(ready[1], &heir, sizeof heir);
    ::pause();
  }
  pid_t heir = 0;
  ASSERT_EQ(::read(ready[0], &heir, sizeof heir), ssize_t{sizeof heir});
  ASSERT_EQ(plane_->channel_count(), 1u);
  ::kill(client, SIGKILL);
  ::waitpid(client, nullptr, 0);
  EXPECT_TRUE(BecomesIdle());
  EXPECT_EQ(::kill(heir, 0), 0) << "the child was to outlive it";
  ::kill(heir, SIGKILL);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(DataDeathTest, ADroppedClientHearsOfItAndTheOthersDoNot) {
  DataPeer dropped = Connect(1);
  DataPeer other = Connect(2);
  plane_->Drop(ClientId(1));
  EXPECT_TRUE(Eventually([&] { return dropped.channel().IsGone(); }));
  EXPECT_TRUE(Eventually([&] { return plane_->channel_count() == 1; }));
  EXPECT_EQ(other.Call(9, {}, 1024).status().code(), absl::StatusCode::kUnimplemented);
}

// Who comes again takes the place of what it had.
TEST_F(DataDeathTest, AClientThatComesAgainHasOneChannel) {
  DataPeer first = Connect(1);
  DataPeer second = Connect(1);
  EXPECT_TRUE(Eventually([&] { return plane_->channel_count() == 1; }));
  EXPECT_TRUE(Eventually([&] { return first.channel().IsGone(); }));
  EXPECT_EQ(second.Call(9, {}, 1024).status().code(), absl::StatusCode::kUnimplemented);
}

TEST_F(DataDeathTest, APeerThatTalksOnTheSocketIsDropped) {
  FdSocket socket = FdSocket::Connect(path(), seconds(60)).value();
  const std::string hello =
      shm::EncodeHello({.version = 1, .epoch = 1, .secret = FakeClients::SecretOf(4)});
  ASSERT_TRUE(socket.Send(hello, -1, seconds(60)).ok());
  ASSERT_TRUE(socket.Receive(512, seconds(60)).ok());
  ASSERT_TRUE(Eventually([&] { return plane_->channel_count() == 1; }));
  ASSERT_TRUE(socket.Send("and another thing", -1, seconds(60)).ok());
  EXPECT_TRUE(BecomesIdle());
}

TEST_F(DataDeathTest, StoppingEndsChannelsThatSleepAndSpin) {
  std::vector<DataPeer> peers;
  for (uint8_t client = 1; client <= 8; ++client) peers.push_back(Connect(client));
  plane_->Stop();
  for (DataPeer& peer : peers) {
    EXPECT_EQ(peer.Call(9, {}, 1024).status().code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(clients_.leases.load(), 0);
  EXPECT_FALSE(TryConnect({.version = 1, .epoch = 1, .secret = FakeClients::SecretOf(1)}).ok());
}

// Clients that leave at random points of their calls: no call, lease or byte stays behind, and a
// half-sent insert can be sent again.
TEST_F(DataDeathTest, ConnectionsDroppedAtRandomPoints) {
  const uint64_t seed = FreshSeed();
  std::mt19937_64 random(seed);
  const TokenData data(shape(), 300, seed);
  for (int round = 0; round < 1000; ++round) {
    const auto client = static_cast<uint8_t>(1 + random() % 8);
    auto channel = TryConnect({.version = 1, .epoch = 1, .secret = FakeClients::SecretOf(client)});
    ASSERT_TRUE(channel.ok()) << channel.status();
    const SequenceRef sequence = Create(SmallSpec(300), kTenant, ClientId(client));
    const ChunkBuffers chunk(data, sequence, {0, 1}, 0, 1 + random() % 200);
    const shm::InsertRequest request{.sequence_id = sequence.id.value(),
                                     .generation = sequence.generation.value(),
                                     .layers = chunk.layers,
                                     .keys = ToRef(chunk.chunk.keys),
                                     .values = ToRef(chunk.chunk.values)};
    const shm::TimePoint deadline = steady_clock::now() + seconds(60);
    const uint64_t steps = random() % 4;
    shm::ClientChannel::Call call;
    if (steps > 0) {
      ASSERT_EQ((*channel)->Begin(shm::PlaceInsert(request).bytes, 1024, deadline, &call),
                shm::CallState::kAnswered);
      shm::EncodeInsert(request, call.request());
    }
    if (steps > 1) (*channel)->Submit(shm::kInsert, deadline, &call);
    if (steps > 2) (*channel)->Wait(deadline, &call);
    call = shm::ClientChannel::Call();
    channel->reset();
    if (round % 50 == 0) {
      DataPeer again = Connect(client);
      ASSERT_TRUE(again.Insert(chunk.chunk).ok());
    }
    engine_->ReleaseOwner(ClientId(client));
  }
  EXPECT_TRUE(BecomesIdle());
  EXPECT_EQ(clients_.running.load(), 0);
  for (uint64_t client = 1; client <= 8; ++client) engine_->ReleaseOwner(ClientId(client));
  EXPECT_TRUE(Eventually([this] { return engine_->Stats().pool.reserved_bytes == 0; }));
  EXPECT_EQ(engine_->Stats().pool.payload_bytes, 0u);
}

}  // namespace
}  // namespace wavekv::testing
