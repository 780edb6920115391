// Both ends of a channel, in one process: the real memory, the real rings, a descriptor socket
// between them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "proto/shm/client_channel.h"
#include "proto/shm/server_channel.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/random.h"
#include "tests/shm/seed.h"

namespace wavekv::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr seconds kLong(60);
constexpr uint64_t kEcho = 1;

// A directory of our own for the socket.
class SocketDir {
 public:
  SocketDir() {
    char name[] = "/tmp/wavekv_channel_XXXXXX";
    EXPECT_NE(::mkdtemp(name), nullptr);
    path_ = name;
  }
  ~SocketDir() { ::rmdir(path_.c_str()); }
  std::string socket() const { return path_ + "/s"; }

 private:
  std::string path_;
};

// Hands `fd` to the one client that comes, after its hello; keeps the connection.
class OneClientDaemon {
 public:
  explicit OneClientDaemon(const std::string& path) : listener_(FdListener::Listen(path).value()) {}

  void Answer(const absl::Status& status, int fd) {
    answering_ = std::thread([this, status, fd] {
      socket_.emplace(listener_.Accept(kLong).value());
      hello_ = socket_->Receive(kHelloBytes + 1, kLong).value().bytes;
      EXPECT_TRUE(socket_->Send(EncodeDescriptorReply(status), fd, kLong).ok());
    });
  }
  void Join() {
    if (answering_.joinable()) answering_.join();
  }
  ~OneClientDaemon() { Join(); }
  void HangUp() { socket_.reset(); }
  const std::string& hello() const { return hello_; }

 private:
  FdListener listener_;
  std::optional<FdSocket> socket_;
  std::string hello_;
  std::thread answering_;
};

class ChannelTest : public ::testing::Test {
 protected:
  void Open(uint32_t ring_entries = 8, uint64_t arena_bytes = kArenaBytesMin) {
    geometry_ = LayOutChannel(ring_entries, arena_bytes).value();
    server_ = ServerChannel::Create("channel_test", geometry_, &slots_).value();
    const UniqueFd fd = server_->TakeFd();
    daemon_.emplace(dir_.socket());
    daemon_->Answer(absl::OkStatus(), fd.get());
    client_ = ClientChannel::Connect(
                  dir_.socket(), {.version = kChannelVersion, .epoch = 1, .secret = RandomSecret()},
                  kLong, &slots_)
                  .value();
    daemon_->Join();
  }

  // Serves until stopped: the reply is the request.
  void ServeEcho() {
    serving_ = std::thread([this] {
      for (;;) {
        const auto next = server_->Next();
        if (!next.ok() || !next->has_value()) {
          broken_ = next.status();
          return;
        }
        const Submission& submission = **next;
        const size_t bytes = std::min(submission.request.size(), submission.reply.size());
        std::copy_n(submission.request.begin(), bytes, submission.reply.begin());
        ++served_;
        server_->Complete(submission, {.reply_bytes = bytes});
      }
    });
  }
  void TearDown() override {
    if (server_ != nullptr) server_->Stop();
    if (serving_.joinable()) serving_.join();
  }

  static TimePoint In(std::chrono::nanoseconds time) { return steady_clock::now() + time; }

  // One echo of `bytes` bytes of `value`.
  void Echo(size_t bytes, std::byte value) {
    ClientChannel::Call call;
    ASSERT_EQ(client_->Begin(bytes, bytes, In(kLong), &call), CallState::kAnswered);
    std::fill(call.request().begin(), call.request().end(), value);
    ASSERT_EQ(client_->Submit(kEcho, In(kLong), &call), CallState::kAnswered);
    ASSERT_EQ(client_->Wait(In(kLong), &call), CallState::kAnswered);
    ASSERT_EQ(call.code(), absl::StatusCode::kOk);
    ASSERT_EQ(call.reply().size(), bytes);
    for (const std::byte found : call.reply()) ASSERT_EQ(found, value);
  }

  SocketDir dir_;
  SpinSlots slots_{2};
  ChannelGeometry geometry_;
  std::unique_ptr<ServerChannel> server_;
  std::optional<OneClientDaemon> daemon_;
  std::shared_ptr<ClientChannel> client_;
  std::atomic<uint64_t> served_{0};
  absl::Status broken_;
  std::thread serving_;
};

TEST_F(ChannelTest, CarriesCallsManyTimesAroundTheRing) {
  Open();
  ServeEcho();
  for (int i = 0; i < 1000; ++i) Echo(1 + static_cast<size_t>(i) * 37 % 5000, std::byte(i));
  EXPECT_EQ(served_.load(), 1000u);
}

TEST_F(ChannelTest, SaysWhoItIs) {
  Open();
  const Hello hello = DecodeHello(daemon_->hello()).value();
  EXPECT_EQ(hello.version, kChannelVersion);
  EXPECT_EQ(hello.secret.size(), 16u);
}

// Threads of one client share the ring; each gets its own answer.
TEST_F(ChannelTest, ThreadsShareIt) {
  Open(/*ring_entries=*/4);
  ServeEcho();
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([this, t] {
      for (int i = 0; i < 200; ++i)
        Echo(64 + static_cast<size_t>(t) * 100, std::byte(t * 16 + i % 16));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(served_.load(), 1600u);
}

// One side sleeps, as on a single CPU: no wake-up is lost in either direction.
TEST_F(ChannelTest, WorksWithoutSpinning) {
  slots_.TryTake();  // The only one.
  Open();
  ServeEcho();
  for (int i = 0; i < 300; ++i) Echo(100, std::byte(i));
  EXPECT_EQ(served_.load(), 300u);
}

TEST_F(ChannelTest, AFullRingWaitsUntilTheDeadline) {
  Open(/*ring_entries=*/2);  // Nobody serves.
  std::vector<ClientChannel::Call> calls(3);
  for (ClientChannel::Call& call : calls) {
    ASSERT_EQ(client_->Begin(64, 64, In(kLong), &call), CallState::kAnswered);
  }
  ASSERT_EQ(client_->Submit(kEcho, In(kLong), &calls[0]), CallState::kAnswered);
  ASSERT_EQ(client_->Submit(kEcho, In(kLong), &calls[1]), CallState::kAnswered);
  EXPECT_EQ(client_->Submit(kEcho, In(milliseconds(30)), &calls[2]), CallState::kTimedOut);
  EXPECT_EQ(client_->Submit(kEcho, In(kLong), &calls[2], Room::kNow), CallState::kFull);
  // With room it goes on.
  ServeEcho();
  ASSERT_EQ(client_->Wait(In(kLong), &calls[0]), CallState::kAnswered);
  ASSERT_EQ(client_->Submit(kEcho, In(kLong), &calls[2]), CallState::kAnswered);
  ASSERT_EQ(client_->Wait(In(kLong), &calls[2]), CallState::kAnswered);
  ASSERT_EQ(client_->Wait(In(kLong), &calls[1]), CallState::kAnswered);
}

TEST_F(ChannelTest, AFullArenaWaitsUntilThereIsRoom) {
  Open();
  const uint64_t half = geometry_.arena_bytes / 2;
  ClientChannel::Call first;
  ClientChannel::Call second;
  ASSERT_EQ(client_->Begin(half + 64, 64, In(kLong), &first), CallState::kAnswered);
  EXPECT_EQ(client_->Begin(half + 64, 64, In(milliseconds(30)), &second), CallState::kTimedOut);
  EXPECT_EQ(client_->Begin(half + 64, 64, In(kLong), &second, Room::kNow), CallState::kFull);
  std::thread waiting(
      [&] { EXPECT_EQ(client_->Begin(half + 64, 64, In(kLong), &second), CallState::kAnswered); });
  first = ClientChannel::Call();
  waiting.join();
}

TEST_F(ChannelTest, MoreThanTheArenaIsTooLarge) {
  Open();
  ClientChannel::Call call;
  EXPECT_EQ(client_->Begin(geometry_.arena_bytes, 64, In(kLong), &call), CallState::kTooLarge);
  EXPECT_EQ(client_->Begin(UINT64_MAX, UINT64_MAX, In(kLong), &call), CallState::kTooLarge);
}

// A call that was given up keeps its place until it is answered: the daemon may still write there.
TEST_F(ChannelTest, AbandonedCallsGiveTheirPlaceBackOnceAnswered) {
  Open(/*ring_entries=*/2);
  for (int i = 0; i < 2; ++i) {
    ClientChannel::Call call;
    ASSERT_EQ(client_->Begin(geometry_.arena_bytes / 2 - 64, 64, In(kLong), &call),
              CallState::kAnswered);
    ASSERT_EQ(client_->Submit(kEcho, In(kLong), &call), CallState::kAnswered);
    EXPECT_EQ(client_->Wait(In(milliseconds(5)), &call), CallState::kTimedOut);
  }
  ClientChannel::Call next;
  EXPECT_EQ(client_->Begin(64, 64, In(milliseconds(30)), &next), CallState::kTimedOut);
  ServeEcho();
  Echo(1000, std::byte{7});
  EXPECT_EQ(served_.load(), 3u);
}

TEST_F(ChannelTest, ADaemonThatHangsUpEndsTheWait) {
  Open();
  ClientChannel::Call call;
  ASSERT_EQ(client_->Begin(64, 64, In(kLong), &call), CallState::kAnswered);
  ASSERT_EQ(client_->Submit(kEcho, In(kLong), &call), CallState::kAnswered);
  daemon_->HangUp();
  EXPECT_EQ(client_->Wait(In(kLong), &call), CallState::kGone);
  EXPECT_TRUE(client_->IsGone());
}

TEST_F(ChannelTest, CancelledCallsEnd) {
  Open();
  ClientChannel::Call call;
  ASSERT_EQ(client_->Begin(64, 64, In(kLong), &call), CallState::kAnswered);
  ASSERT_EQ(client_->Submit(kEcho, In(kLong), &call), CallState::kAnswered);
  std::thread canceller([this] { client_->CancelCalls(); });
  EXPECT_EQ(client_->Wait(In(kLong), &call), CallState::kCancelled);
  canceller.join();
}

TEST_F(ChannelTest, StopEndsAServerThatSleeps) {
  for (int i = 0; i < 50; ++i) {
    ServerChannel& server =
        *(server_ = ServerChannel::Create("stop", LayOutChannel(2, kArenaBytesMin).value(), &slots_)
                        .value());
    std::thread serving([&server] {
      const auto next = server.Next();
      EXPECT_TRUE(next.ok() && !next->has_value());
    });
    if (i % 2 == 0) std::this_thread::yield();
    server.Stop();
    serving.join();
  }
}

// The client's view is refused unless it can trust the memory for ever.
TEST_F(ChannelTest, ClientRefusesMemoryThatCanShrink) {
  geometry_ = LayOutChannel(8, kArenaBytesMin).value();
  const UniqueFd unsealed = CreateMemfd("unsealed", geometry_.channel_bytes).value();
  const ChannelHeader header = HeaderOf(geometry_);
  ASSERT_EQ(::pwrite(unsealed.get(), &header, sizeof header, 0), ssize_t{sizeof header});
  daemon_.emplace(dir_.socket());
  daemon_->Answer(absl::OkStatus(), unsealed.get());
  const auto client =
      ClientChannel::Connect(dir_.socket(), {.secret = RandomSecret()}, kLong, &slots_);
  EXPECT_EQ(client.status().code(), absl::StatusCode::kFailedPrecondition) << client.status();
}

TEST_F(ChannelTest, NobodyCanShrinkWhatTheDaemonMade) {
  const auto server =
      ServerChannel::Create("sealed", LayOutChannel(8, kArenaBytesMin).value(), &slots_).value();
  const UniqueFd fd = server->TakeFd();
  EXPECT_NE(::ftruncate(fd.get(), 0), 0);
  EXPECT_NE(::ftruncate(fd.get(), 1 << 30), 0);
}

// A client that writes what it likes into its ring. Each round is a channel of its own.
class HostileRingTest : public ChannelTest {
 protected:
  // A raw mapping, as a client that does not use our library has it.
  void OpenRaw() {
    geometry_ = LayOutChannel(8, kArenaBytesMin).value();
    server_ = ServerChannel::Create("hostile", geometry_, &slots_).value();
    fd_ = server_->TakeFd();
    memory_ = Mapping::Map(fd_.get(), geometry_.channel_bytes, Mapping::kReadWrite).value();
  }
  ChannelHeader& header() { return *reinterpret_cast<ChannelHeader*>(memory_.data()); }
  void Submit(const SubmissionEntry& entry) {
    const uint32_t tail = header().tail;
    std::memcpy(memory_.data() + geometry_.submissions_offset + tail % 8 * sizeof entry, &entry,
                sizeof entry);
    AtomicWord(header().tail).store(tail + 1);
    FutexWake(&header().tail);
  }

  UniqueFd fd_;
  Mapping memory_;
};

TEST_F(HostileRingTest, ATailOutOfReachEndsTheChannel) {
  for (const uint32_t tail : {9u, 1000u, 0x80000000u, 0xffffffffu}) {
    OpenRaw();
    header().tail = tail;
    EXPECT_EQ(server_->Next().status().code(), absl::StatusCode::kInvalidArgument) << tail;
  }
}

TEST_F(HostileRingTest, PlacesOutsideTheArenaAreAnsweredAndNeverTouched) {
  OpenRaw();
  const uint64_t arena = geometry_.arena_offset;
  struct Row {
    SubmissionEntry entry;
    const char* why;
  };
  const Row rows[] = {
      {{.request_offset = 0, .request_bytes = 64, .reply_offset = arena}, "request in the header"},
      {{.request_offset = arena, .request_bytes = UINT64_MAX, .reply_offset = arena}, "wraps"},
      {{.request_offset = arena, .reply_offset = 128, .reply_bytes_max = 4}, "reply in the header"},
      {{.request_offset = arena,
        .reply_offset = geometry_.channel_bytes - 8,
        .reply_bytes_max = 16},
       "reply past the end"},
      {{.request_offset = UINT64_MAX, .reply_offset = UINT64_MAX}, "nowhere"},
  };
  for (size_t i = 0; i < std::size(rows); ++i) Submit(rows[i].entry);
  Submit({.verb = kEcho, .request_offset = arena, .request_bytes = 1, .reply_offset = arena});
  const auto next = server_->Next();
  ASSERT_TRUE(next.ok() && next->has_value());
  EXPECT_EQ((*next)->number, std::size(rows)) << "the good one is the only one that came through";
  for (size_t i = 0; i < std::size(rows); ++i) {
    const auto& done =
        reinterpret_cast<const CompletionEntry*>(memory_.data() + geometry_.completions_offset)[i];
    EXPECT_EQ(done.state, kDone) << rows[i].why;
    EXPECT_EQ(done.code, static_cast<uint32_t>(absl::StatusCode::kInvalidArgument)) << rows[i].why;
  }
}

// Random bytes over header and rings while the daemon serves: it serves what is in bounds, ends the
// channel otherwise, and never hangs or touches another byte. The sanitizers watch.
TEST_F(HostileRingTest, GarbageOverALiveRing) {
  std::mt19937_64 random(FreshSeed());
  for (int round = 0; round < 30; ++round) {
    OpenRaw();
    broken_ = absl::OkStatus();
    ServeEcho();
    for (int i = 0; i < 200; ++i) {
      const size_t at = random() % geometry_.arena_offset / 8 * 8;
      std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(memory_.data() + at))
          .store(random() % 3 == 0 ? random() % 16 : random(), std::memory_order_relaxed);
      if (random() % 4 == 0) {
        Submit({.verb = random() % 8,
                .request_offset = geometry_.arena_offset + random() % 4096,
                .request_bytes = random() % 8192,
                .reply_offset = geometry_.arena_offset + random() % (2 << 20),
                .reply_bytes_max = random() % 8192});
      }
    }
    server_->Stop();
    serving_.join();
  }
}

}  // namespace
}  // namespace wavekv::shm
