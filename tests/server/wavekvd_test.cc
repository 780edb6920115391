// The program itself: flags, starting twice, dying, stopping (rows 2, 3, 24, 28 and 30 of the list
// of faults).

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/daemon_threads.h"
#include "tests/server/daemon_process.h"
#include "tests/server/test_server.h"
#include "tests/storage/real_cgroup.h"
#include "tests/unread_pipe.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Threads of a daemon on one CPU of two: build and compute pools, the lanes of calls, gRPC's own,
// and the accept, lease and main threads.
constexpr uint32_t kThreadsMaxOnOneCpu = 48;
constexpr int kOwnThreadsMaxOnOneCpu = 26;

class WavekvdTest : public ::testing::Test {
 protected:
  std::vector<std::string> Flags(std::vector<std::string> more = {}) const {
    std::vector<std::string> flags = {"--listen=" + address_, "--pool_bytes=64MiB"};
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }

  const TempDir directory_;
  const std::string address_ = "unix:" + directory_.path() + "/s";
};

TEST_F(WavekvdTest, ServesAndStopsOnSigterm) {
  for (const int signal : {SIGTERM, SIGINT}) {
    DaemonProcess daemon(Flags());
    ASSERT_TRUE(daemon.WaitReady()) << daemon.log();
    EXPECT_EQ(daemon.LogValue("ready", "address"), address_);
    EXPECT_EQ(daemon.LogValue("ready", "pool_bytes"), "67108864");
    struct stat info {};
    ASSERT_EQ(stat((directory_.path() + "/s").c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    TestClient client(address_);
    ASSERT_TRUE(client.Attach().ok());
    EXPECT_EQ(std::to_string(client.attached().epoch()), daemon.LogValue("ready", "epoch"));
    const v1::SequenceRef sequence = client.Create(64);
    EXPECT_TRUE(client.Insert(sequence, 0, 64).ok());
    daemon.Signal(signal);
    EXPECT_EQ(daemon.Wait(), 0) << daemon.log();
    EXPECT_THAT(daemon.log(), HasSubstr("event=stopped"));
    EXPECT_NE(access((directory_.path() + "/s").c_str(), F_OK), 0);
  }
}

TEST_F(WavekvdTest, AStopFinishesARunningCallAndEndsAWaitingStream) {
  DaemonProcess daemon(Flags({"--shutdown_grace_ms=50000"}));
  ASSERT_TRUE(daemon.WaitReady()) << daemon.log();
  TestClient client(address_);
  ASSERT_TRUE(client.Attach().ok());
  const v1::SequenceRef sequence = client.Create(4096);
  ASSERT_TRUE(client.Insert(sequence, 0, 2000).ok());
  const std::unique_ptr<grpc::ClientContext> context = client.Context();
  const auto decode = client.stub()->Decode(context.get());
  v1::AttendRequest request;
  v1::AttendItem* item = request.add_items();
  *item->mutable_sequence() = sequence;
  *item->mutable_queries() = TestQueries(0);
  v1::AttendReply reply;
  ASSERT_TRUE(decode->Write(request));
  ASSERT_TRUE(decode->Read(&reply));
  daemon.Signal(SIGTERM);
  EXPECT_EQ(decode->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(daemon.Wait(), 0) << daemon.log();
}

TEST_F(WavekvdTest, ASecondOnTheSocketFailsByNameAndTheFirstServesOn) {
  DaemonProcess first(Flags());
  ASSERT_TRUE(first.WaitReady()) << first.log();
  TestClient before(address_);
  ASSERT_TRUE(before.Attach().ok());
  DaemonProcess second(Flags());
  EXPECT_EQ(second.Wait(), 1);
  EXPECT_THAT(second.log(), HasSubstr(address_));
  EXPECT_THAT(second.log(), HasSubstr("process " + std::to_string(first.pid())));
  v1::HeartbeatReply reply;
  EXPECT_TRUE(before.stub()->Heartbeat(before.Context().get(), {}, &reply).ok());
  TestClient after(address_);
  EXPECT_TRUE(after.Attach().ok());
  EXPECT_EQ(after.attached().epoch(), before.attached().epoch());
}

TEST_F(WavekvdTest, ASecondOnThePortFailsByName) {
  const std::string tokens = directory_.path() + "/tokens";
  std::ofstream(tokens) << "alice-alice-alice alice\n";
  ASSERT_EQ(chmod(tokens.c_str(), 0600), 0);
  DaemonProcess first(Flags({"--listen_tcp=127.0.0.1:0", "--token_file=" + tokens}));
  ASSERT_TRUE(first.WaitReady()) << first.log();
  const std::string port = first.LogValue("ready", "tcp_address");
  ASSERT_NE(port, "");
  DaemonProcess second(
      {"--listen=", "--pool_bytes=64MiB", "--listen_tcp=" + port, "--token_file=" + tokens});
  EXPECT_EQ(second.Wait(), 1);
  EXPECT_THAT(second.log(), HasSubstr(port));
  TestClient client(port, "alice-alice-alice");
  EXPECT_TRUE(client.Attach().ok());
}

TEST_F(WavekvdTest, AfterKillTheNextOneTakesTheSocketAndHasAnotherEpoch) {
  std::string epoch;
  for (int life = 0; life < 3; ++life) {
    DaemonProcess daemon(Flags());
    ASSERT_TRUE(daemon.WaitReady()) << daemon.log();
    EXPECT_NE(daemon.LogValue("ready", "epoch"), epoch);
    epoch = daemon.LogValue("ready", "epoch");
    TestClient client(address_);
    EXPECT_TRUE(client.Attach().ok());
    daemon.Signal(SIGKILL);
    EXPECT_EQ(daemon.Wait(), 128 + SIGKILL);
  }
}

TEST_F(WavekvdTest, RefusesWhatItDoesNotUnderstand) {
  struct Row {
    std::vector<std::string> flags;
    int exit_code;
    std::string text;
  };
  for (const Row& row : std::vector<Row>{
           {{"--no_such_flag=1"}, 2, "no_such_flag"},
           {{"positional"}, 2, "positional"},
           {{"--pool_bytes=abc"}, 2, "--pool_bytes=abc"},
           {{"--pool_bytes=1"}, 2, "--pool_bytes=1"},
           {{"--wave_buffer_cache_ratio=nan"}, 2, "--wave_buffer_cache_ratio"},
           {{"--wave_buffer_staging_tokens=0"}, 2, "--wave_buffer_staging_tokens"},
           {{"--flagfile=/no/such/flags"}, 2, "/no/such/flags"},
           {{"--metrics_address=0.0.0.0:0"}, 2, "--allow_remote"},
           {{"--pool_bytes=4096TiB"}, 1, "pool"},
           {{"--socket_mode=rw"}, 2, "--socket_mode"},
           {{"--listen=tcp:1"}, 2, "--listen"},
           {{"--listen_tcp=127.0.0.1:0"}, 2, "--token_file"},
           {{"--message_bytes_max=4GiB"}, 2, "--message_bytes_max"},
           {{"--build_threads=4294967295"}, 2, "--build_threads"},
           {{"--compute_threads=4294967295"}, 2, "--compute_threads"},
           {{"--worker_threads=4294967295"}, 2, "--worker_threads"},
           {{"--tokens_max=18446744073709551615"}, 2, "--tokens_max"},
           {{"--sequences_max=4294967295"}, 2, "--sequences_max"},
           {{"--batch_max=4294967295"}, 2, "--batch_max"},
           {{"--clients_max=4294967295"}, 2, "--clients_max"},
           {{"--uids_max=4294967295"}, 2, "--uids_max"},
           {{"--lease_ms=18446744073709551615"}, 2, "--lease_ms"},
           {{"--shutdown_grace_ms=18446744073709551615"}, 2, "--shutdown_grace_ms"},
           {{"--tenant_map=nobody"}, 2, "--tenant_map"},
           {{"--log_level=loud"}, 2, "loud"},
           {{"--listen=unix:/no/such/place/s"}, 1, "/no/such/place"},
           {{"--token_file=/no/such/file", "--listen_tcp=127.0.0.1:0"}, 1, "/no/such/file"},
       }) {
    DaemonProcess daemon(Flags(row.flags));
    EXPECT_EQ(daemon.Wait(), row.exit_code) << row.flags[0] << "\n" << daemon.log();
    EXPECT_THAT(daemon.log(), HasSubstr(row.text));
    EXPECT_THAT(daemon.log(), HasSubstr("event=failed"));
    EXPECT_THAT(daemon.log(), Not(HasSubstr("event=ready")));
  }
}

TEST_F(WavekvdTest, RefusesAnInstructionSetThatIsNotThere) {
  setenv("WAVEKV_ISA", "mmx", 1);
  DaemonProcess daemon(Flags());
  unsetenv("WAVEKV_ISA");
  EXPECT_EQ(daemon.Wait(), 2) << daemon.log();
  EXPECT_THAT(daemon.log(), HasSubstr("event=failed"));
  EXPECT_THAT(daemon.log(), HasSubstr("scalar")) << "what there is";
}

TEST_F(WavekvdTest, TellsItsVersionAndItsFlags) {
  DaemonProcess version({"--version"});
  EXPECT_EQ(version.Wait(), 0);
  EXPECT_EQ(version.log(), std::string("wavekvd ") + WAVEKV_VERSION + "\n");
  DaemonProcess help({"--help"});
  EXPECT_EQ(help.Wait(), 0);
  for (const char* flag : {"--pool_bytes", "--listen", "--wave_buffer"}) {
    EXPECT_THAT(help.log(), HasSubstr(flag));
  }
}

TEST_F(WavekvdTest, ReadsAFlagFile) {
  const std::string path = directory_.path() + "/flags";
  std::ofstream(path) << "--listen=" << address_ << "\n--pool_bytes=32MiB\n";
  DaemonProcess daemon({"--flagfile=" + path});
  ASSERT_TRUE(daemon.WaitReady()) << daemon.log();
  EXPECT_EQ(daemon.LogValue("ready", "pool_bytes"), "33554432");
}

TEST_F(WavekvdTest, OnOneCpuItsThreadsAreFew) {
  DaemonProcess daemon(Flags(), [] {
    cpu_set_t all;
    cpu_set_t one;
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (!CPU_ISSET(cpu, &all)) continue;
      CPU_SET(cpu, &one);
      break;
    }
    sched_setaffinity(0, sizeof one, &one);
  });
  ASSERT_TRUE(daemon.WaitReady()) << daemon.log();
  // Row 24: 32 clients at once. Each looks at the daemon after each of its calls, and none leaves
  // before all have come.
  constexpr int kClients = 32;
  std::vector<uint32_t> seen(kClients, 0);
  std::vector<int> own_seen(kClients, 0);
  std::barrier all_attached(kClients);
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back(
        [this, &all_attached, pid = daemon.pid(), &most = seen[i], &own_most = own_seen[i]] {
          TestClient client(address_);
          const auto look = [&] {
            v1::GetStatsReply stats;
            EXPECT_TRUE(client.stub()->GetStats(client.Context().get(), {}, &stats).ok());
            EXPECT_GT(stats.threads(), 0u);
            most = std::max(most, stats.threads());
            own_most = std::max(own_most, OwnThreadCount(pid));
          };
          EXPECT_TRUE(client.Attach().ok());
          all_attached.arrive_and_wait();
          look();
          const v1::SequenceRef sequence = client.Create(64);
          EXPECT_TRUE(client.Insert(sequence, 0, 32).ok());
          look();
          EXPECT_TRUE(client.Build(sequence).ok());
          look();
          all_attached.arrive_and_wait();
        });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(*std::max_element(seen.begin(), seen.end()),
            kThreadsMaxOnOneCpu + GrpcThreadsOfMoreCpus());
  const int own_threads = *std::max_element(own_seen.begin(), own_seen.end());
  EXPECT_GT(own_threads, 0);
  EXPECT_LE(own_threads, kOwnThreadsMaxOnOneCpu);
}

// Row 2: whoever should read its log does not, from its first line to its last.
TEST_F(WavekvdTest, ServesAndStopsWhenNobodyReadsItsLog) {
  UnreadPipe pipe;
  pipe.Fill();
  DaemonProcess daemon(Flags(), [&pipe] { dup2(pipe.write_end(), STDERR_FILENO); });
  TestClient client(address_);
  ASSERT_TRUE(client.Attach().ok());
  const v1::SequenceRef sequence = client.Create(64);
  EXPECT_TRUE(client.Insert(sequence, 0, 64).ok());
  v1::QueryRequest query;
  *query.mutable_sequence() = sequence;
  *query.mutable_queries() = TestQueries(0);
  v1::QueryReply found;
  const grpc::Status status = client.stub()->Query(client.Context().get(), query, &found);
  EXPECT_TRUE(status.ok()) << status.error_message();
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
  EXPECT_EQ(pipe.Drain(), UnreadPipe::Filling()) << "no part of a line";
}

// Another program that has the same stderr fills it; later somebody reads it again.
TEST_F(WavekvdTest, TellsHowManyLinesNobodyRead) {
  UnreadPipe pipe;
  DaemonProcess daemon(Flags({"--lease_ms=600000"}),
                       [&pipe] { dup2(pipe.write_end(), STDERR_FILENO); });
  TestClient first(address_);
  ASSERT_TRUE(first.Attach().ok());
  std::string text;
  // Written after the socket is there, so it may come after the first answer.
  while (text.find("event=ready") == std::string::npos ||
         text.find("event=client_attached") == std::string::npos) {
    pollfd ready = {pipe.read_end(), POLLIN, 0};
    ASSERT_GT(poll(&ready, 1, 60'000), 0) << text;
    text += pipe.Drain();
  }
  pipe.Fill();
  for (int i = 0; i < 3; ++i) {
    TestClient client(address_);
    ASSERT_TRUE(client.Attach().ok());
  }
  EXPECT_EQ(pipe.Drain(), UnreadPipe::Filling());
  daemon.Signal(SIGTERM);
  EXPECT_EQ(daemon.Wait(), 0);
  EXPECT_THAT(pipe.Drain(), testing::MatchesRegex("ts=.* event=log_lines_lost count=3\n"
                                                  "ts=.* event=shutting_down .*\n"
                                                  "ts=.* event=stopped\n"));
}

// Row 28: a control group of 512 MiB around the program itself.
TEST_F(WavekvdTest, InAControlGroupThatIsTooSmallItDoesNotStart) {
  const RealCgroup group(512ull << 20);
  if (!group.error().empty()) GTEST_SKIP() << group.error();
  const auto enter = [&group] {
    if (!group.Enter()) _exit(99);
  };
  {
    DaemonProcess daemon({"--listen=" + address_, "--pool_bytes=1GiB"}, enter);
    EXPECT_EQ(daemon.Wait(), 1) << daemon.log();
    EXPECT_THAT(daemon.log(), HasSubstr("--pool_bytes"));
    EXPECT_THAT(daemon.log(), HasSubstr(group.limit_file()));
    EXPECT_THAT(daemon.log(), HasSubstr(std::to_string(512ull << 20)));
    EXPECT_THAT(daemon.log(), Not(HasSubstr("event=ready")));
  }
  // One that fits starts, and tells the limit.
  DaemonProcess daemon(Flags(), enter);
  ASSERT_TRUE(daemon.WaitReady()) << daemon.log();
  TestClient client(address_);
  ASSERT_TRUE(client.Attach().ok());
  v1::GetStatsReply stats;
  ASSERT_TRUE(client.stub()->GetStats(client.Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.cgroup_limit_bytes(), 512ull << 20);
  EXPECT_LE(stats.memory_available_bytes(), 512ull << 20);
  EXPECT_THAT(stats.cgroup_version(), testing::AnyOf("v1", "v2"));
}

}  // namespace
}  // namespace wavekv
