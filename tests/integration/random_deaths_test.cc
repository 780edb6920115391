// Engines over resident regions, wavekvd and wavebufferd, one of which is killed at a random point,
// again and again: nothing hangs, no answer is wrong, the survivors serve the next engine, and the
// GPU's memory comes back. On a real GPU where WAVEKV_TEST_GPU=1, otherwise over the fake driver.
// WAVEKV_TEST_ROUNDS says how often, WAVEKV_TEST_SEED which points.
#include <gmock/gmock.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "gpu/driver/device.h"
#include "gpu/driver/device_usage.h"
#include "gpu/resident/resident_plan.h"
#include "gpu/tenant_buffer.h"
#include "tests/gpu/driver/use_fake_cuda.h"
#include "tests/integration/decode_peer.h"
#include "tests/integration/raw_client.h"
#include "tests/integration/resident_engine.h"
#include "tests/integration/sdk_test.h"

namespace wavekv::integration {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AnyOf;
using ::testing::Eq;

constexpr int kRoundsByDefault = 9;
// Until an engine is where it is to be met: it waits for a minute itself.
constexpr seconds kPatience(90);
// Until an engine has noticed that a daemon is gone: some deadlines of its own.
constexpr seconds kNotice(60);
constexpr milliseconds kDelayMax(30);  // After the line that an engine is met at.

// What the driver may keep for itself: less than one tenant's buffer here.
constexpr uint64_t kDriftBytes = uint64_t{4} << 20;

enum class Victim { kEngine, kWavekvd, kWavebufferd };
constexpr std::array kVictims = {Victim::kEngine, Victim::kWavekvd, Victim::kWavebufferd};
constexpr const char* kVictimNames[] = {"the engine", "wavekvd", "wavebufferd"};

struct Death {
  Victim victim;
  std::string line;  // Of the engine; then
  milliseconds delay;

  std::string ToString() const {
    return absl::StrCat(kVictimNames[static_cast<int>(victim)], " dies ", delay.count(),
                        " ms after '", absl::StripSuffix(line, "\n"), "'");
  }
};

// Deaths without end; each victim once in three.
class Deaths {
 public:
  explicit Deaths(uint64_t seed) : random_(seed) {}

  Death Next() {
    if (next_ == 0) std::shuffle(victims_.begin(), victims_.end(), random_);
    Death death;
    death.victim = victims_[next_];
    next_ = (next_ + 1) % victims_.size();
    death.line = Line();
    death.delay = milliseconds(Below(kDelayMax.count() + 1));
    return death;
  }
  uint64_t Below(uint64_t end) {
    return std::uniform_int_distribution<uint64_t>(0, end - 1)(random_);
  }

 private:
  // One in four is before the first token.
  std::string Line() {
    const char* const lines[] = {kConnected, kBuilt, kAttached};
    if (Below(4) == 0) return lines[Below(std::size(lines))];
    return TokenLine(kPeerFirstToken + Below(kPeerTokens - kPeerFirstToken));
  }

  std::mt19937_64 random_;
  std::array<Victim, kVictims.size()> victims_ = kVictims;
  size_t next_ = 0;
};

// All that is in use on the GPU; no context is made.
absl::StatusOr<uint64_t> DeviceBytesUsed() {
  const auto driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const auto identity = CudaDevice::Identify(**driver, 0);
  if (!identity.ok()) return identity.status();
  return ReadDeviceBytesUsed(identity->uuid);
}

class RandomDeathsTest : public SdkTest {
 protected:
  // Room for two regions and not for three: one that is not given back is soon missed.
  void StartDaemons() {
    const auto plan = resident::PlanResident(ResidentShape(), kPeerTokensMax,
                                             {.cache_ratio = ResidentRegionOptions().cache_ratio,
                                              .ring_rows = ResidentRegionOptions().ring_rows,
                                              .segment_tokens = kResidentSegmentTokens,
                                              .small_segment_tokens = kResidentSmallSegmentTokens});
    ASSERT_OK(StatusOf(plan));
    const uint64_t bytes = plan->region_bytes * 5 / 2 + TenantBuffer::BytesMin(1024);
    Start({.wavekvd_flags = {"--lease_ms=3000", absl::StrCat("--wave_buffer_bytes=", bytes)},
           .backend = "cuda"});
    session_.reset();
  }

  std::unique_ptr<Process> StartEngine(uint64_t seed) {
    auto engine = Process::Start(
        {.argv = {ProgramPath("decode_peer"), daemons().address(), absl::StrCat(seed)}});
    EXPECT_OK(engine.status());
    return engine.ok() ? *std::move(engine) : nullptr;
  }

  // Another one takes its place at once, while the engine may still think of the old one.
  void KillDaemon(Victim victim) {
    const bool is_wavekvd = victim == Victim::kWavekvd;
    Process& daemon = is_wavekvd ? daemons().wavekvd() : daemons().wavebufferd();
    daemon.Signal(SIGKILL);
    ASSERT_EQ(daemon.WaitForExit(kNotice), 128 + SIGKILL) << "it was dead before:\n"
                                                          << daemon.Output();
    ASSERT_OK(is_wavekvd ? daemons().RestartWavekvd() : daemons().RestartWavebufferd());
  }

  // A new engine is served, by whatever has survived, until it or a daemon dies.
  void Round(const Death& death, uint64_t seed) {
    const std::unique_ptr<Process> engine = StartEngine(seed);
    ASSERT_NE(engine, nullptr);
    ASSERT_TRUE(engine->WaitForOutput(death.line, kPatience)) << engine->Output();
    (void)engine->WaitForExit(death.delay);
    if (death.victim == Victim::kEngine) {
      engine->Signal(SIGKILL);
    } else {
      KillDaemon(death.victim);
      if (HasFatalFailure()) return;
    }
    const std::optional<int> exit = engine->WaitForExit(kNotice);
    ASSERT_TRUE(exit.has_value()) << "the engine hangs:\n" << engine->Output();
    const int noticed = death.victim == Victim::kEngine ? 128 + SIGKILL : int{kPeerAway};
    // It may have come to its end just before.
    ASSERT_THAT(*exit, AnyOf(Eq(noticed), Eq(int{kPeerDecoded}))) << engine->Output();
    if (*exit == noticed) ++disturbed_;
  }

  int disturbed_ = 0;  // Engines that were killed, or that noticed a daemon's death.
};

TEST_F(RandomDeathsTest, SurvivorsServeTheNextEngine) {
  const uint64_t seed = FreshSeed();
  const char* const wanted = std::getenv("WAVEKV_TEST_ROUNDS");
  const int rounds = wanted == nullptr ? kRoundsByDefault : std::atoi(wanted);
  ASSERT_GT(rounds, 0) << "WAVEKV_TEST_ROUNDS";
  const bool fake = UseFakeCuda();
  absl::StatusOr<uint64_t> before;
  if (!fake) {
    before = DeviceBytesUsed();
    ASSERT_OK(before.status());
  }
  StartDaemons();
  Deaths deaths(seed);
  for (int round = 0; round < rounds && !HasFailure(); ++round) {
    const Death death = deaths.Next();
    SCOPED_TRACE(absl::StrCat("round ", round, ": ", death.ToString()));
    std::printf("round %d: %s\n", round, death.ToString().c_str());
    Round(death, deaths.Below(UINT32_MAX));
  }
  if (HasFailure()) return;
  std::printf("%d engines were disturbed, %d were not\n", disturbed_, rounds - disturbed_);
  EXPECT_GE(disturbed_ * 4, rounds) << "hardly a death met an engine at work: this shows little";

  const std::unique_ptr<Process> last = StartEngine(deaths.Below(UINT32_MAX));
  ASSERT_NE(last, nullptr);
  ASSERT_EQ(last->WaitForExit(kPatience), int{kPeerDecoded}) << last->Output();
  ASSERT_TRUE(last->WaitForOutput(", of the log mass", kNotice)) << last->Output();
  const std::string output = last->Output();
  std::printf("%s\n", output.substr(output.rfind("decode_peer:")).c_str());
  const auto raw = RawClient::Attach(daemons().address());
  ASSERT_OK(raw.status());
  EXPECT_TRUE(Eventually([&] {
    const auto stats = (*raw)->Stats();
    return stats.ok() && HoldsNothing(*stats);
  })) << "wavekvd keeps what the dead held";
  daemons_.reset();
  if (fake) return;
  absl::StatusOr<uint64_t> after;
  EXPECT_TRUE(Eventually([&] {
    after = DeviceBytesUsed();
    return after.ok() && *after <= *before + kDriftBytes;
  })) << "before: "
      << *before << " bytes in use on the GPU; after: " << *after;
}

}  // namespace
}  // namespace wavekv::integration
