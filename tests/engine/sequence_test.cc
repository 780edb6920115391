// A sequence without an engine around it.
#include "daemon/engine/sequence.h"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/engine/builder.h"
#include "daemon/engine/validation.h"
#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

constexpr uint64_t kTtlMs = 1000;

class SequenceTest : public ::testing::Test {
 protected:
  std::shared_ptr<Sequence> Create() {
    auto memory = SequenceMemory::Create(pool_, kTenant, spec_, 1, "test");
    EXPECT_TRUE(memory.ok()) << memory.status();
    return std::make_shared<Sequence>(SequenceIdentity{SequenceId(1), kTenant, spec_}, kOwner,
                                      *std::move(memory), &builder_, &clock_);
  }

  SequenceSpec spec_ = SmallSpec(3000);
  FakeClock clock_;
  const std::shared_ptr<BlockPool> pool_ = BlockPool::Create({.bytes_max = uint64_t{64} << 20});
  const std::unique_ptr<ComputeBackend> backend_ = CreateCpuBackend();
  const IndexGauge gauge_ = std::make_shared<std::atomic<uint64_t>>(0);
  // Without threads: jobs wait until the test takes them.
  StepPriority steps_{std::chrono::milliseconds(0)};
  Builder builder_{{.thread_count = 0}, backend_.get(), &steps_, gauge_};
};

// Unmapping a large sequence takes long. Whoever asks after the sequence meanwhile (a list of all
// sequences, an eviction for another) must not wait for that: what goes, goes without its lock.
TEST_F(SequenceTest, MemoryGoesWithoutTheLock) {
  struct Row {
    std::string name;
    std::function<void(Sequence*)> end;
  };
  for (const Row& row : std::vector<Row>{
           {"drop", [](Sequence* sequence) { sequence->End(); }},
           {"owner gone", [](Sequence* sequence) { sequence->ReleaseOwner(kOwner); }},
           {"expired",
            [this](Sequence* sequence) {
              sequence->SetTtl(kTtlMs);
              clock_.AdvanceMs(kTtlMs);
              EXPECT_TRUE(sequence->EndIfExpired());
            }},
       }) {
    SCOPED_TRACE(row.name);
    const std::shared_ptr<Sequence> sequence = Create();
    const TokenData data(spec_.shape, 2000, FreshSeed());
    const ChunkBuffers buffers(data, {SequenceId(1), Generation(1)}, {0, 1}, 0, 2000);
    const absl::StatusOr<RowBatch> batch = ReadInsertChunk(spec_.shape, buffers.chunk);
    ASSERT_TRUE(batch.ok()) << batch.status();
    ASSERT_TRUE(sequence->Append(Generation(1), *batch, AppendMode::kInsert, nullptr).ok());
    absl::StatusOr<StartedJob> started = sequence->StartJob(0);
    ASSERT_TRUE(started.ok()) << started.status();
    // A segment whose memory asks its sequence something when it goes: a lock that is held would
    // be waited for by its holder.
    bool gone = false;
    const TokenRange range = started->job->range;
    SegmentHead head;
    head.first_position = range.begin;
    head.token_count = static_cast<uint32_t>(range.size());
    std::vector<SegmentHead> heads(spec_.shape.kv_head_count, head);
    heads[0].payload_owner = std::shared_ptr<const void>(&gone, [&](const void*) {
      gone = true;
      EXPECT_TRUE(sequence->ended());
    });
    sequence->FinishJob(0, *started->job,
                        std::make_shared<const Segment>(range, std::move(heads), 0, gauge_));
    started->snapshot = LayerSnapshot();
    ASSERT_FALSE(gone) << "published";
    EXPECT_GT(pool_->Usage().reserved_bytes, 0u);
    row.end(sequence.get());
    EXPECT_TRUE(gone);
    EXPECT_EQ(pool_->Usage().reserved_bytes, 0u);
  }
}

}  // namespace
}  // namespace wavekv::testing
