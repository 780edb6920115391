// The resident path between real processes, over the fake driver: an engine whose steps attend and
// append in its region while wavekvd stores, clusters and publishes.
#include <gmock/gmock.h>
#include <signal.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/resident/resident_plan.h"
#include "gpu/tenant_buffer.h"
#include "tests/gpu/driver/use_fake_cuda.h"
#include "tests/integration/resident_engine.h"
#include "tests/integration/sdk_test.h"

namespace wavekv::integration {
namespace {

using std::chrono::seconds;
using ::testing::HasSubstr;
using Results = std::vector<resident::StepResult>;
using Is = resident::StepHead::Is;
using Clock = std::chrono::steady_clock;

constexpr seconds kPatience(60);
constexpr double kTolerance = 1e-6;  // Float64 over the same rows; logits of the CPU's are exact.

double Distance(std::span<const double> found, std::span<const double> exact) {
  double worst = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    worst = std::max(worst, std::abs(found[i] - exact[i]));
  }
  return worst;
}

class ResidentPathTest : public SdkTest {
 protected:
  void SetUp() override {
    if (!UseFakeCuda()) GTEST_SKIP() << "steps in C++ cannot reach a real GPU's memory";
  }
  void StartDaemons(std::vector<std::string> flags = {}) {
    Start({.wavekvd_flags = std::move(flags), .backend = "cuda"});
  }
  std::unique_ptr<client::Sequence> Filled(HostCache* cache, uint64_t token_count,
                                           uint64_t max_tokens = 6000) {
    auto sequence = CreateResidentSequence(session(), cache, token_count, max_tokens);
    EXPECT_OK(StatusOf(sequence));
    return sequence.ok() ? *std::move(sequence) : nullptr;
  }
  std::unique_ptr<ResidentEngine> Attach(client::Sequence* sequence) {
    auto engine = ResidentEngine::Attach(sequence);
    EXPECT_OK(StatusOf(engine));
    return engine.ok() ? *std::move(engine) : nullptr;
  }
  // Steps on to `end` tokens; every few of them are compared with exact attention.
  void StepTo(ResidentEngine* engine, HostCache* cache, uint64_t end, uint64_t seed) {
    while (engine->token_count() < end) {
      const uint64_t position = engine->token_count();
      const std::vector<float> queries = RandomQueries(cache->shape(), seed + position);
      const absl::StatusOr<Results> results = engine->Step(cache, queries);
      ASSERT_OK(StatusOf(results));
      for (uint32_t layer = 0; layer < results->size(); ++layer) {
        const resident::StepResult& result = (*results)[layer];
        for (const resident::StepHead& head : result.heads) {
          ASSERT_EQ(head.is, Is::kAttended) << "position " << position;
          ASSERT_FALSE(head.overflowed) << "position " << position;
          ASSERT_EQ(head.appended, position + 1);
          hits_ += head.hits();
          version_ = head.version;
        }
        if (position % 11 != 0 && position + 1 != end) continue;
        const HostCache::Exact exact = cache->Attend(layer, queries, position + 1);
        ASSERT_LT(Distance(result.out, exact.out), kTolerance)
            << "layer " << layer << ", position " << position;
        ASSERT_LT(Distance(result.lse, exact.lse), kTolerance);
      }
    }
  }
  // The daemon's own exact attention over what is stored.
  void ExpectStored(client::Sequence* sequence, HostCache* cache, uint64_t token_count,
                    uint64_t seed) {
    const std::vector<float> queries = RandomQueries(cache->shape(), seed);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const auto attention =
          sequence->Attend(layer, QueryTensor(cache->shape(), queries), {.exact = true});
      ASSERT_OK(StatusOf(attention));
      EXPECT_EQ(attention->token_count, token_count);
      const HostCache::Exact exact = cache->Attend(layer, queries, token_count);
      EXPECT_LT(RelativeError(attention->out, exact.out), 1e-4);
    }
  }
  // Asks for the state until it has ended, with a bound.
  absl::Status WhyEnded(client::Sequence* sequence) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      const auto state = sequence->ResidentStatus(UINT64_MAX - 1, std::chrono::milliseconds(50));
      if (!state.ok()) return state.status();
      if (!state->attached.ok()) return state->attached;
    }
    return absl::OkStatus();
  }

  uint64_t hits_ = 0;     // Of all steps.
  uint64_t version_ = 0;  // That the last step saw.
};

TEST_F(ResidentPathTest, StepsAttendAndAppendWhileVersionsMove) {
  const uint64_t seed = FreshSeed();
  StartDaemons();
  HostCache cache = HostCache::Random(ResidentShape(), 3200, seed);
  const auto sequence = Filled(&cache, 2500);
  ASSERT_NE(sequence, nullptr);
  auto engine = Attach(sequence.get());
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->attachment().token_count, 2500u);
  EXPECT_EQ(engine->attachment().windows.size(), 1u);
  StepTo(engine.get(), &cache, 2501, seed);
  const uint64_t first_version = version_;
  StepTo(engine.get(), &cache, 3200, seed);
  EXPECT_GT(version_, first_version);
  EXPECT_GT(hits_, 0u);

  // An append of the daemon's own is refused; reading goes on.
  const std::vector<std::byte> row(2 * 64 * 2);
  client::AttendOptions append;
  append.append_keys = client::Tensor{DType::kBF16, {2, 64}, row.data()};
  append.append_values = client::Tensor{DType::kBF16, {2, 64}, row.data()};
  const std::vector<float> queries = RandomQueries(cache.shape(), seed);
  EXPECT_EQ(sequence->Attend(0, QueryTensor(cache.shape(), queries), append).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_OK(sequence->Attend(0, QueryTensor(cache.shape(), queries)).status());

  const auto state = sequence->ResidentStatus();
  ASSERT_OK(StatusOf(state));
  EXPECT_OK(state->attached);
  EXPECT_EQ(state->overflows, 0u);
  EXPECT_EQ(state->violations, 0u);
  EXPECT_GT(state->hit_blocks, 0u);
  EXPECT_GT(state->miss_blocks, 0u);
  ASSERT_OK(sequence->DetachResident());
  EXPECT_EQ(sequence->token_count(1), 3200u);
  ExpectStored(sequence.get(), &cache, 3200, seed);

  // Attached again it goes on from what is stored.
  engine.reset();
  HostCache longer(
      ResidentShape(), 3400,
      [&](uint32_t layer, uint64_t position, uint32_t head, uint32_t d) {
        return cache.Key(layer, position % 3200, head, d);
      },
      [&](uint32_t layer, uint64_t position, uint32_t head, uint32_t d) {
        return cache.Value(layer, position % 3200, head, d);
      });
  engine = Attach(sequence.get());
  ASSERT_NE(engine, nullptr);
  EXPECT_EQ(engine->attachment().token_count, 3200u);
  StepTo(engine.get(), &longer, 3400, seed);
  ASSERT_OK(sequence->DetachResident());
  ExpectStored(sequence.get(), &longer, 3400, seed);
}

TEST_F(ResidentPathTest, TruncateInsertAndGoOn) {
  const uint64_t seed = FreshSeed();
  StartDaemons();
  HostCache cache = HostCache::Random(ResidentShape(), 2450, seed);
  const HostCache fresh = HostCache::Random(ResidentShape(), 2450, seed + 1);
  constexpr uint64_t kKept = 2250;
  const auto mixed = [&](const auto& old_element, const auto& new_element) {
    return [&, old_element, new_element](uint32_t layer, uint64_t position, uint32_t head,
                                         uint32_t d) {
      return position < kKept ? (cache.*old_element)(layer, position, head, d)
                              : (fresh.*new_element)(layer, position, head, d);
    };
  };
  HostCache other(ResidentShape(), 2450, mixed(&HostCache::Key, &HostCache::Key),
                  mixed(&HostCache::Value, &HostCache::Value));
  const auto sequence = Filled(&cache, 2000);
  ASSERT_NE(sequence, nullptr);
  const auto engine = Attach(sequence.get());
  ASSERT_NE(engine, nullptr);
  StepTo(engine.get(), &cache, 2300, seed);
  // A step under way stands in the way of both.
  engine->BeginStep();
  EXPECT_EQ(sequence->Truncate(kKept).code(), absl::StatusCode::kFailedPrecondition);
  const HostCache::Chunk late = cache.Slice(2300, 10, 0, 2);
  EXPECT_EQ(sequence->Insert(2300, late.layers, late.keys, late.values).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine->EndStep(RandomQueries(cache.shape(), seed)).heads[0].is, Is::kAttended);

  ASSERT_OK(sequence->Insert(2300, late.layers, late.keys, late.values));
  engine->SetTokenCount(2310);
  StepTo(engine.get(), &cache, 2400, seed);
  ASSERT_OK(sequence->Truncate(kKept));
  engine->SetTokenCount(kKept);
  StepTo(engine.get(), &other, 2450, seed);
  // A truncation into a long segment leaves more exact tokens than the ring holds.
  ASSERT_OK(sequence->Truncate(1700));
  const absl::Status ended = WhyEnded(sequence.get());
  EXPECT_EQ(ended.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(ended.message()), HasSubstr("build the index"));
  ASSERT_OK(sequence->BuildIndex().status());
  const auto again = Attach(sequence.get());
  ASSERT_NE(again, nullptr);
  StepTo(again.get(), &other, 1800, seed);
  ASSERT_OK(sequence->DetachResident());
  ExpectStored(sequence.get(), &other, 1800, seed);
}

TEST_F(ResidentPathTest, AForkReadsItsParentsRowsThroughASecondWindow) {
  const uint64_t seed = FreshSeed();
  StartDaemons();
  HostCache cache = HostCache::Random(ResidentShape(), 2450, seed);
  auto parent = Filled(&cache, 2000);
  ASSERT_NE(parent, nullptr);
  const auto parent_engine = Attach(parent.get());
  ASSERT_NE(parent_engine, nullptr);
  StepTo(parent_engine.get(), &cache, 2050, seed);
  auto child = parent->Fork(2000);
  ASSERT_OK(StatusOf(child));
  const auto child_engine = Attach(child->get());
  ASSERT_NE(child_engine, nullptr);
  EXPECT_EQ(child_engine->attachment().windows.size(), 2u);
  // Both step; then the parent ends under the child.
  StepTo(parent_engine.get(), &cache, 2200, seed);
  StepTo(child_engine.get(), &cache, 2200, seed + 1);
  ASSERT_OK(parent->Drop());
  StepTo(child_engine.get(), &cache, 2450, seed + 2);
  ASSERT_OK((*child)->DetachResident());
  ExpectStored(child->get(), &cache, 2450, seed);
}

TEST_F(ResidentPathTest, AnEngineKilledInMidStepGivesItsRegionBackOnlyThen) {
  const uint64_t seed = FreshSeed();
  // Room for one region and not for two.
  const auto plan = resident::PlanResident(ResidentShape(), 4096,
                                           {.cache_ratio = 0.5,
                                            .ring_rows = 512,
                                            .segment_tokens = kResidentSegmentTokens,
                                            .small_segment_tokens = kResidentSmallSegmentTokens});
  ASSERT_OK(StatusOf(plan));
  StartDaemons({absl::StrCat("--wave_buffer_bytes=",
                             plan->region_bytes * 3 / 2 + TenantBuffer::BytesMin(1024))});
  const auto engine = Process::Start({.argv = {ProgramPath("resident_peer"), daemons().address()}});
  ASSERT_OK(StatusOf(engine));
  ASSERT_TRUE((*engine)->WaitForOutput("detached in mid-step", kPatience)) << (*engine)->Output();
  HostCache cache = HostCache::Random(ResidentShape(), 1500, seed);
  const auto sequence = Filled(&cache, 1400, 4096);
  ASSERT_NE(sequence, nullptr);
  const auto refused = ResidentEngine::Attach(sequence.get());
  EXPECT_EQ(StatusOf(refused).code(), absl::StatusCode::kResourceExhausted) << StatusOf(refused);
  EXPECT_THAT(std::string(StatusOf(refused).message()), HasSubstr("--wave_buffer_bytes"));

  (*engine)->Signal(SIGKILL);
  ASSERT_TRUE((*engine)->WaitForExit(kPatience).has_value());
  const auto mine = Attach(sequence.get());
  ASSERT_NE(mine, nullptr);
  StepTo(mine.get(), &cache, 1500, seed);
}

TEST_F(ResidentPathTest, ALostWaveBufferEndsTheAttachmentAndNotTheSequence) {
  const uint64_t seed = FreshSeed();
  StartDaemons();
  HostCache cache = HostCache::Random(ResidentShape(), 2100, seed);
  const auto sequence = Filled(&cache, 2000);
  ASSERT_NE(sequence, nullptr);
  const auto engine = Attach(sequence.get());
  ASSERT_NE(engine, nullptr);
  StepTo(engine.get(), &cache, 2100, seed);
  const auto deadline = Clock::now() + kPatience;
  while (sequence->token_count() < 2100 && Clock::now() < deadline) {
    ASSERT_OK(sequence->ResidentStatus().status());
  }
  daemons().wavebufferd().Signal(SIGKILL);
  EXPECT_EQ(WhyEnded(sequence.get()).code(), absl::StatusCode::kUnavailable);
  ExpectStored(sequence.get(), &cache, 2100, seed);
  EXPECT_EQ(sequence->AttachResident().status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(ResidentPathTest, ALostDaemonIsNoticedWithinADeadline) {
  const uint64_t seed = FreshSeed();
  StartDaemons();
  constexpr seconds kDeadline(3);
  session_ = Connect(kDeadline);
  HostCache cache = HostCache::Random(ResidentShape(), 2020, seed);
  const auto sequence = Filled(&cache, 2000);
  ASSERT_NE(sequence, nullptr);
  const auto engine = Attach(sequence.get());
  ASSERT_NE(engine, nullptr);
  StepTo(engine.get(), &cache, 2010, seed);
  daemons().wavekvd().Signal(SIGKILL);
  ASSERT_TRUE(daemons().wavekvd().WaitForExit(kPatience).has_value());
  // Steps go on over what is there: the memory is the engine's as well.
  StepTo(engine.get(), &cache, 2020, seed);
  const auto begin = Clock::now();
  const absl::Status lost = sequence->ResidentStatus(UINT64_MAX - 1, kPatience).status();
  EXPECT_TRUE(absl::IsUnavailable(lost) || absl::IsDeadlineExceeded(lost)) << lost;
  EXPECT_LT(Clock::now() - begin, 2 * kDeadline);
  ASSERT_OK(daemons().RestartWavekvd());
  absl::Status after;
  const auto deadline = Clock::now() + kPatience;
  do {
    after = sequence->ResidentStatus().status();
  } while (!absl::IsFailedPrecondition(after) && Clock::now() < deadline);
  EXPECT_THAT(std::string(after.message()), HasSubstr("restarted"));
}

TEST_F(ResidentPathTest, AWaveBufferInHostMemoryIsRefusedWithTheCure) {
  Start({.backend = "host"});
  HostCache cache = HostCache::Random(ResidentShape(), 1400, 1);
  const auto sequence = Filled(&cache, 1400);
  ASSERT_NE(sequence, nullptr);
  const absl::Status refused = sequence->AttachResident(ResidentRegionOptions()).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("use Attend"));
  ExpectStored(sequence.get(), &cache, 1400, 1);
}

}  // namespace
}  // namespace wavekv::integration
