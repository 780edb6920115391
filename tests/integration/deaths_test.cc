// Processes that die or stop, on either side: an engine pays at most one deadline, a daemon
// nothing.

#include <signal.h>

#include <chrono>
#include <future>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/integration/raw_client.h"
#include "tests/integration/sdk_test.h"

namespace wavekv::integration {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kDeadline(3000);
// What a busy test machine may add to a deadline.
constexpr milliseconds kMargin(3000);

bool IsAway(const absl::Status& status) {
  return status.code() == absl::StatusCode::kUnavailable ||
         status.code() == absl::StatusCode::kDeadlineExceeded;
}

class DeathsTest : public SdkTest {
 protected:
  // One decode step of a token of zeros in every layer.
  static absl::Status DecodeStep(client::Sequence* sequence) {
    const std::vector<float> queries = RandomQueries(Shape(), 1);
    const std::vector<float> row(2 * 64, 0.0f);
    client::AttendOptions append;
    append.append_keys = client::Tensor{DType::kF32, {2, 64}, row.data()};
    append.append_values = client::Tensor{DType::kF32, {2, 32}, row.data()};
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const auto attention = sequence->Attend(layer, QueryTensor(Shape(), queries), append);
      if (!attention.ok()) return attention.status();
    }
    return absl::OkStatus();
  }
};

// A daemon killed in the middle of a decode: the step under way fails within the deadline, and so
// do those after it, instead of hanging.
TEST_F(DeathsTest, DaemonKilledInMidDecode) {
  Start({.wave_buffer = false});
  session_ = Connect(kDeadline);
  HostCache cache = HostCache::Random(Shape(), 2000, 1);
  const auto sequence = CreateFilled(&cache, 50'000);
  ASSERT_NE(sequence, nullptr);
  std::promise<void> decoding;
  Clock::time_point failed_at;
  absl::Status failure;
  std::thread decoder([&] {
    for (int step = 0; step < 50'000 && failure.ok(); ++step) {
      failure = DecodeStep(sequence.get());
      if (step == 10) decoding.set_value();
    }
    failed_at = Clock::now();
  });
  const bool started = decoding.get_future().wait_for(seconds(60)) == std::future_status::ready;
  const auto killed_at = Clock::now();
  daemons().wavekvd().Signal(SIGKILL);
  decoder.join();
  ASSERT_TRUE(started) << failure;
  EXPECT_TRUE(IsAway(failure)) << failure;
  EXPECT_LT(failed_at - killed_at, kDeadline + kMargin);
  const auto begin = Clock::now();
  EXPECT_TRUE(IsAway(DecodeStep(sequence.get())));
  EXPECT_LT(Clock::now() - begin, kDeadline + kMargin);
}

// A daemon that is restarted: its epoch is another, old ids are refused and not used again, the
// session attaches again by itself and works.
TEST_F(DeathsTest, DaemonRestarted) {
  Start({.wave_buffer = false});
  session_ = Connect(kDeadline);
  HostCache cache = HostCache::Random(Shape(), 300, 2);
  const auto old_sequence = CreateFilled(&cache);
  ASSERT_NE(old_sequence, nullptr);
  const uint64_t old_epoch = session().info().epoch;
  daemons().wavekvd().Signal(SIGKILL);
  ASSERT_TRUE(daemons().wavekvd().WaitForExit(seconds(30)).has_value());
  ASSERT_OK(daemons().RestartWavekvd());

  absl::Status old_status;
  Eventually([&] { return !IsAway(old_status = DecodeStep(old_sequence.get())); }, seconds(30));
  EXPECT_EQ(old_status.code(), absl::StatusCode::kFailedPrecondition) << old_status;
  EXPECT_NE(old_status.message().find("restarted"), absl::string_view::npos) << old_status;
  EXPECT_NE(session().info().epoch, old_epoch);
  const auto new_sequence = CreateFilled(&cache);
  ASSERT_NE(new_sequence, nullptr);
  EXPECT_NE(new_sequence->id(), old_sequence->id());
  EXPECT_TRUE(DecodeStep(new_sequence.get()).ok());
  // The daemon itself refuses the old id: it is not the SDK's memory that does.
  auto raw = RawClient::Attach(daemons().address());
  ASSERT_OK(raw.status());
  v1::SequenceRef old_ref;
  old_ref.set_sequence_id(old_sequence->id());
  old_ref.set_generation(old_sequence->generation());
  EXPECT_EQ((*raw)->Drop(old_ref).code(), absl::StatusCode::kNotFound);
  // And its sequence is not dropped in the new daemon by the old object's end.
  EXPECT_TRUE(DecodeStep(new_sequence.get()).ok());
}

// A stopped daemon answers nothing and closes nothing: the deadline alone ends the call. When it
// goes on, so does the session.
TEST_F(DeathsTest, DaemonStopped) {
  Start({.wave_buffer = false});
  session_ = Connect(kDeadline);
  HostCache cache = HostCache::Random(Shape(), 300, 3);
  const auto sequence = CreateFilled(&cache);
  ASSERT_NE(sequence, nullptr);
  daemons().wavekvd().Suspend();
  const std::vector<float> queries = RandomQueries(Shape(), 3);
  const auto begin = Clock::now();
  const auto stopped = sequence->Attend(0, QueryTensor(Shape(), queries));
  EXPECT_TRUE(IsAway(stopped.status())) << stopped.status();
  EXPECT_LT(Clock::now() - begin, kDeadline + kMargin);
  daemons().wavekvd().Signal(SIGCONT);
  absl::Status status;
  EXPECT_TRUE(Eventually(
      [&] {
        status = sequence->Attend(0, QueryTensor(Shape(), queries)).status();
        return status.ok();
      },
      seconds(30)))
      << status;
}

// An engine that stops in the middle of its decode, and is killed later: its lease has not ended,
// so the daemon keeps its channel, its steps in the wave buffer and its memory, and waits for none.
TEST_F(DeathsTest, AClientThatStopsOrDiesHoldsUpNobody) {
  Start({.wave_buffer = true, .wavekvd_flags = {"--lease_ms=600000"}});
  session_ = Connect(kDeadline);
  attach_wave_buffer_ = true;
  HostCache cache = HostCache::Random(Shape(), 300, 6);
  const auto sequence = CreateFilled(&cache, 256);
  ASSERT_NE(sequence, nullptr);
  auto raw = RawClient::Attach(daemons().address());
  ASSERT_OK(raw.status());
  const auto reserved = [&raw] {
    const auto stats = (*raw)->Stats();
    EXPECT_OK(stats.status());
    return stats.ok() ? stats->pool_reserved_bytes() : 0;
  };
  const uint64_t without_engine = reserved();
  auto engine =
      Process::Start({.argv = {ProgramPath("mock_decoder"), "--mode=wavekv", "--tokens=8192",
                               "--needles=128", "--address=" + daemons().address()}});
  ASSERT_OK(engine.status());
  ASSERT_TRUE((*engine)->WaitForOutput("phase=decoding", seconds(60))) << (*engine)->Output();
  const auto expect_served = [&] {
    const auto begin = Clock::now();
    EXPECT_OK((*raw)->CheckHealth());
    EXPECT_OK((*raw)->Stats().status());
    const std::vector<float> queries = RandomQueries(Shape(), 6);
    EXPECT_OK(Attend(*sequence, 0, QueryTensor(Shape(), queries)).status());
    EXPECT_OK(DecodeStep(sequence.get()));
    EXPECT_NE(CreateFilled(&cache), nullptr);
    EXPECT_LT(Clock::now() - begin, kDeadline + kMargin);
  };
  (*engine)->Suspend();
  expect_served();
  (*engine)->Signal(SIGKILL);
  expect_served();
  EXPECT_EQ((*engine)->WaitForExit(seconds(30)), 128 + SIGKILL) << "it had not ended by itself";
  expect_served();
  EXPECT_GT(reserved(), without_engine) << "the lease goes on";
}

// A wave buffer that is killed or stopped takes its staging with it, and nothing else: the daemon
// still answers, with the same bits, and a staged step is right or an error within the deadline.
TEST_F(DeathsTest, WaveBufferKilledOrStopped) {
  for (const int signal : {SIGSTOP, SIGKILL}) {
    SCOPED_TRACE(signal);
    Start({.wave_buffer = true});
    session_ = Connect(kDeadline);
    HostCache cache = HostCache::Random(Shape(), 2000, 5);
    client::SequenceOptions options;
    options.shape = Shape();
    options.max_tokens = 2064;
    options.attach_wave_buffer = true;
    auto sequence = session().CreateSequence(options);
    ASSERT_OK(sequence.status());
    const HostCache::Chunk chunk = cache.All();
    ASSERT_OK((*sequence)->Insert(0, chunk.layers, chunk.keys, chunk.values));
    ASSERT_OK((*sequence)->BuildIndex().status());
    const std::vector<float> queries = RandomQueries(Shape(), 5);
    const auto before = (*sequence)->Attend(0, QueryTensor(Shape(), queries));
    const auto staged_before = (*sequence)->AttendStaged(0, QueryTensor(Shape(), queries));
    ASSERT_OK(before.status());
    ASSERT_OK(staged_before.status());

    if (signal == SIGSTOP) {
      daemons().wavebufferd().Suspend();
    } else {
      daemons().wavebufferd().Signal(SIGKILL);
      ASSERT_TRUE(daemons().wavebufferd().WaitForExit(seconds(30)).has_value());
    }
    for (int step = 0; step < 100; ++step) {
      const auto begin = Clock::now();
      const auto attention = (*sequence)->Attend(0, QueryTensor(Shape(), queries));
      ASSERT_OK(attention.status());
      ASSERT_EQ(attention->out, before->out);
      const auto staged = (*sequence)->AttendStaged(0, QueryTensor(Shape(), queries));
      ASSERT_TRUE(!staged.ok() || staged->out == staged_before->out) << staged.status();
      ASSERT_LT(Clock::now() - begin, 2 * kDeadline + kMargin);
    }
    // New sequences come and go without it.
    EXPECT_NE(CreateFilled(&cache), nullptr);
    session_.reset();
    daemons_.reset();
  }
}

struct KillRow {
  std::string after;  // What the engine has just said.
  std::string why;
};

// An engine killed at any point of its life costs nothing once its lease is over: memory,
// sequences, descriptors and the wave buffer's share come back.
TEST_F(DeathsTest, ClientKilled) {
  const KillRow rows[] = {
      {"phase=admitted", "memory is reserved, nothing was inserted"},
      {"phase=prefilled", "segments are being clustered"},
      {"phase=decoding", "steps are being staged"},
  };
  Start({.wave_buffer = true, .wavekvd_flags = {"--lease_ms=500"}});
  session_.reset();
  auto raw = RawClient::Attach(daemons().address());
  ASSERT_OK(raw.status());
  int descriptors = 0;
  for (const KillRow& row : rows) {
    SCOPED_TRACE(row.why);
    auto engine =
        Process::Start({.argv = {ProgramPath("mock_decoder"), "--mode=wavekv", "--tokens=8192",
                                 "--needles=128", "--address=" + daemons().address()}});
    ASSERT_OK(engine.status());
    ASSERT_TRUE((*engine)->WaitForOutput(row.after, seconds(60))) << (*engine)->Output();
    const auto held = (*raw)->Stats();
    ASSERT_OK(held.status());
    (*engine)->Signal(SIGKILL);
    EXPECT_EQ((*engine)->WaitForExit(seconds(30)), 128 + SIGKILL);
    EXPECT_GT(held->pool_reserved_bytes(), 0u);
    absl::StatusOr<v1::GetStatsReply> stats;
    // The numbers of one reply are not of one instant: a sequence's memory is given back before the
    // sequence is off the list.
    EXPECT_TRUE(Eventually(
        [&] {
          stats = (*raw)->Stats();
          return stats.ok() && HoldsNothing(*stats);
        },
        seconds(30)))
        << stats.status() << " " << stats->ShortDebugString();
    // The engine's connection is closed by the kernel; what is left is what was there before.
    if (descriptors == 0) descriptors = DescriptorCount(daemons().wavekvd().pid());
    EXPECT_LE(DescriptorCount(daemons().wavekvd().pid()), descriptors + 2);
  }
  session_ = Connect();
  HostCache cache = HostCache::Random(Shape(), 300, 4);
  EXPECT_NE(CreateFilled(&cache), nullptr);
}

}  // namespace
}  // namespace wavekv::integration
