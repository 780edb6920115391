#include "gpu/sequence_region.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <random>
#include <string>
#include <thread>

#include "storage/base/shared_memory.h"
#include "tests/gpu/stage_rows.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

constexpr SequenceId kSequence{0x700000003};

ModelShape Shape(uint32_t key_dim = 64, uint32_t value_dim = 64, DType dtype = DType::kBF16) {
  ModelShape shape;
  shape.layer_count = 1;
  shape.query_head_count = 2;
  shape.kv_head_count = 2;
  shape.key_dim = key_dim;
  shape.value_dim = value_dim;
  shape.dtype = dtype;
  shape.softmax_scale = 1;
  return shape;
}

BufferStagerOptions Options(uint64_t cache_bytes, uint32_t staging_tokens) {
  BufferStagerOptions options;
  options.cache_bytes_min = cache_bytes;
  options.cache_bytes_max = cache_bytes;
  options.staging_tokens = staging_tokens;
  return options;
}

// A region in a memfd, and a reader's mapping of the same.
class Harness {
 public:
  Harness(const ModelShape& shape, const BufferStagerOptions& options)
      : shape_(shape), layout_(PlanRegion(shape, 1 << 16, options)) {
    const uint64_t bytes = TenantBuffer::BytesMin(4) + layout_.region_bytes;
    const UniqueFd fd = CreateMemfd("sequence_region_test", bytes).value();
    reader_ = Mapping::Map(fd.get(), bytes, Mapping::kReadOnly).value();
    buffer_ = TenantBuffer::Create(
                  MapHostBuffer(Mapping::Map(fd.get(), bytes, Mapping::kReadWrite).value()), 4)
                  .value();
    region_ = SequenceRegion::Create(buffer_, kSequence, shape.kv_head_count, layout_,
                                     std::make_shared<std::atomic<uint64_t>>(0))
                  .value();
  }

  // Empty when the reader finds every row of `step` that `heads` asked for.
  std::string Check(const StagedStep& step, const std::vector<StageHead>& heads) const {
    if (header()->step.load(std::memory_order_acquire) < step.step) return "step not published";
    for (size_t h = 0; h < heads.size(); ++h) {
      const StagedHead& staged = step.heads[h];
      std::string differs = CompareSpans(shape_, reader_.data(), reader_.bytes(), staged.steady,
                                         heads[h].steady, heads[h].steady.size());
      if (!differs.empty()) return "steady: " + differs;
      differs = CompareSpans(shape_, reader_.data(), reader_.bytes(), staged.retrieved,
                             heads[h].retrieved, staged.retrieved_runs);
      if (!differs.empty()) return "retrieved: " + differs;
    }
    return "";
  }

  // Finds the region as a reader does: through the directory.
  const RegionHeader* header() const {
    const auto* buffer = reinterpret_cast<const BufferHeader*>(reader_.data());
    const auto* entries =
        reinterpret_cast<const DirectoryEntry*>(reader_.data() + buffer->directory_offset);
    for (uint32_t i = 0; i < buffer->directory_entries; ++i) {
      if (entries[i].sequence_id.load(std::memory_order_acquire) == kSequence.value()) {
        return reinterpret_cast<const RegionHeader*>(reader_.data() + entries[i].region_offset);
      }
    }
    return nullptr;
  }

  const ModelShape shape_;
  const RegionLayout layout_;
  Mapping reader_;
  std::shared_ptr<TenantBuffer> buffer_;
  std::shared_ptr<SequenceRegion> region_;
};

std::shared_ptr<const CodedRows> Rows(const ModelShape& shape, uint32_t tag, uint32_t row_count) {
  return std::make_shared<CodedRows>(shape, tag, 0, row_count);
}

uint64_t BlocksOf(const std::vector<StageRun>& runs, size_t run_count) {
  uint64_t blocks = 0;
  for (size_t i = 0; i < run_count; ++i) blocks += (runs[i].rows.row_count + 7) / 8;
  return blocks;
}

TEST(SequenceRegionTest, HeaderDescribesTheRegion) {
  const Harness harness(Shape(96, 32, DType::kF32), Options(64 << 10, 256));
  const RegionHeader* header = harness.header();
  ASSERT_NE(header, nullptr);
  EXPECT_EQ(header->magic, kRegionMagic);
  EXPECT_EQ(header->sequence_id.load(), kSequence.value());
  EXPECT_EQ(header->key_row_bytes, 96u * 4);
  EXPECT_EQ(header->value_row_bytes, 32u * 4);
  EXPECT_EQ(header->slot_bytes, 8u * (96 + 32) * 4);
  EXPECT_EQ(header->slot_count, (64u << 10) / header->slot_bytes);
  EXPECT_EQ(header->step.load(), 0u);
  EXPECT_GE(header->staging_offset, header->cache_offset + header->slot_bytes * header->slot_count);
  EXPECT_GE(header->staging_bytes, 256u * 2 * (96 + 32) * 4);
}

TEST(SequenceRegionTest, MissesBecomeHitsOnceAdmitted) {
  Harness harness(Shape(), Options(64 << 10, 256));
  std::vector<StageHead> heads(1);
  heads[0].retrieved = {RunOf(Rows(harness.shape_, 1, 20), 5, 0),
                        RunOf(Rows(harness.shape_, 2, 8), 5, 3)};
  std::vector<MissedBlock> misses;
  const auto cold = harness.region_->Stage(0, 0, heads, &misses);
  ASSERT_TRUE(cold.ok()) << cold.status();
  EXPECT_EQ(cold->hit_blocks, 0u);
  EXPECT_EQ(cold->miss_blocks, 4u);
  ASSERT_EQ(misses.size(), 4u);
  EXPECT_EQ(harness.region_->Admit(misses), 4u);
  EXPECT_EQ(harness.region_->Admit(misses), 0u);  // They are there already.
  std::vector<MissedBlock> none;
  const auto warm = harness.region_->Stage(0, 1, heads, &none);
  ASSERT_TRUE(warm.ok()) << warm.status();
  EXPECT_EQ(warm->hit_blocks, 4u);
  EXPECT_EQ(warm->miss_blocks, 0u);
  EXPECT_TRUE(none.empty());
  EXPECT_EQ(harness.Check(*warm, heads), "");
  for (const StagedSpan& span : warm->heads[0].retrieved) {
    EXPECT_TRUE(span.cache_hit);
    EXPECT_LT(span.key_offset, harness.header()->staging_offset);  // In place, not copied.
  }
}

TEST(SequenceRegionTest, RunsWithoutIdentityAreNeverCached) {
  Harness harness(Shape(), Options(64 << 10, 256));
  std::vector<StageHead> heads(1);
  heads[0].retrieved = {RunOf(Rows(harness.shape_, 1, 8), 0, 0)};
  for (uint64_t step = 0; step < 3; ++step) {
    std::vector<MissedBlock> misses;
    const auto staged = harness.region_->Stage(0, step, heads, &misses);
    ASSERT_TRUE(staged.ok()) << staged.status();
    EXPECT_EQ(staged->miss_blocks, 1u);
    EXPECT_TRUE(misses.empty());
    EXPECT_EQ(harness.Check(*staged, heads), "");
  }
}

TEST(SequenceRegionTest, TouchCountsAndAdmitsWithoutStaging) {
  Harness harness(Shape(), Options(64 << 10, 256));
  std::vector<StageHead> heads(1);
  heads[0].retrieved = {RunOf(Rows(harness.shape_, 1, 17), 5, 0),
                        RunOf(Rows(harness.shape_, 2, 3), 0, 0)};
  std::vector<MissedBlock> misses;
  StageCounters counters = harness.region_->Touch(heads, &misses);
  EXPECT_EQ(counters.hit_blocks, 0u);
  EXPECT_EQ(counters.miss_blocks, 4u);
  EXPECT_EQ(harness.region_->Admit(misses), 3u);
  misses.clear();
  counters = harness.region_->Touch(heads, &misses);
  EXPECT_EQ(counters.hit_blocks, 3u);
  EXPECT_EQ(counters.miss_blocks, 1u);
  EXPECT_EQ(harness.header()->step.load(), 0u);
}

TEST(SequenceRegionTest, TailThatDoesNotFitIsLeftOut) {
  // 64 tokens for both heads: 16 blocks of one head.
  Harness harness(Shape(), Options(64 << 10, 64));
  std::vector<StageHead> heads(2);
  for (uint32_t h = 0; h < 2; ++h) {
    heads[h].kv_head = h;
    heads[h].steady = {RunOf(Rows(harness.shape_, 100 + h, 16), 0, 0)};
    for (uint32_t i = 0; i < 8; ++i) {
      heads[h].retrieved.push_back(RunOf(Rows(harness.shape_, 8 * h + i, 16), 5 + h, 2 * i));
    }
  }
  std::vector<MissedBlock> misses;
  const auto step = harness.region_->Stage(0, 0, heads, &misses);
  ASSERT_TRUE(step.ok()) << step.status();
  // 128 head rows, 32 of them steady: room for 6 runs of 16, dealt to both heads.
  EXPECT_EQ(step->heads[0].retrieved_runs, 3u);
  EXPECT_EQ(step->heads[1].retrieved_runs, 3u);
  EXPECT_EQ(step->hit_blocks + step->miss_blocks, 12u);
  EXPECT_EQ(harness.Check(*step, heads), "");

  // Nothing is free until the step is completed: the steady rows alone do not fit.
  const auto full = harness.region_->Stage(3, 0, heads, &misses);
  EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(full.status().message()),
              testing::AllOf(HasSubstr("--wave_buffer_staging_tokens"), HasSubstr("layer 3")));
  const auto next = harness.region_->Stage(0, 1, heads, &misses);
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->step, 2u);  // The step that failed was none.
}

TEST(SequenceRegionTest, CompletedStepThatNeverWasIsRefused) {
  Harness harness(Shape(), Options(64 << 10, 64));
  std::vector<StageHead> heads(1);
  std::vector<MissedBlock> misses;
  const auto step = harness.region_->Stage(0, 7, heads, &misses);
  EXPECT_EQ(step.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(step.status().message()), HasSubstr("completed_step is 7"));
  EXPECT_TRUE(harness.region_->Stage(0, 0, heads, &misses).ok());
}

TEST(SequenceRegionTest, ClosedRegionIsWipedAndGoesBack) {
  Harness harness(Shape(), Options(64 << 10, 64));
  const uint64_t free_bytes = harness.buffer_->free_bytes();
  std::vector<StageHead> heads(1);
  heads[0].steady = {RunOf(Rows(harness.shape_, 1, 16), 0, 0)};
  heads[0].retrieved = {RunOf(Rows(harness.shape_, 2, 32), 5, 0)};
  std::vector<MissedBlock> misses;
  ASSERT_TRUE(harness.region_->Stage(0, 0, heads, &misses).ok());
  ASSERT_EQ(harness.region_->Admit(misses), 4u);
  const auto* first = reinterpret_cast<const std::byte*>(harness.header());
  harness.region_->Close();
  EXPECT_EQ(harness.header(), nullptr);  // No longer in the directory.
  const auto zero = [](std::byte byte) { return byte == std::byte{0}; };
  EXPECT_TRUE(std::all_of(first, first + harness.layout_.region_bytes, zero));
  EXPECT_EQ(harness.buffer_->free_bytes(), free_bytes + harness.layout_.region_bytes);
  EXPECT_EQ(harness.region_->Stage(0, 0, heads, &misses).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(harness.region_->Admit(misses), 0u);
  EXPECT_EQ(harness.region_->Touch(heads, &misses).miss_blocks, 0u);
}

// The promise of epochs: whatever is staged and admitted later, a step that was not completed reads
// back whole. Small cache, small ring, random steps, completed with a random lag.
void RunEpochs(const ModelShape& shape, uint64_t seed) {
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  Harness harness(shape, Options(48 << 10, 96));
  struct Cluster {
    std::shared_ptr<const CodedRows> rows;
    uint32_t first_block;
  };
  std::vector<Cluster> clusters;
  uint32_t block = 0;
  for (uint32_t i = 0; i < 48; ++i) {
    const auto row_count = static_cast<uint32_t>(1 + random() % 32);
    clusters.push_back({Rows(shape, i, row_count), block});
    block += (row_count + 7) / 8;
  }
  struct Live {
    StagedStep step;
    std::vector<StageHead> heads;
  };
  std::deque<Live> live;
  std::deque<std::vector<MissedBlock>> waiting;  // Admissions lag behind, too.
  uint64_t completed = 0, hits = 0, left_out = 0;
  for (int i = 0; i < 1500; ++i) {
    std::vector<StageHead> heads(shape.kv_head_count);
    for (uint32_t h = 0; h < heads.size(); ++h) {
      heads[h].kv_head = h;
      const auto steady = static_cast<uint32_t>(random() % 24);
      heads[h].steady.push_back(RunOf(Rows(shape, 1000 + static_cast<uint32_t>(i), steady), 0, 0));
      for (uint64_t n = random() % 6; n > 0; --n) {
        // Squared: some clusters are asked for far more often than others.
        const uint64_t pick = random() % clusters.size() * (random() % clusters.size());
        const Cluster& cluster = clusters[pick / clusters.size()];
        heads[h].retrieved.push_back(RunOf(cluster.rows, 5 + h, cluster.first_block));
      }
    }
    while (live.size() > random() % 4) {
      completed = live.front().step.step;
      live.pop_front();
    }
    std::vector<MissedBlock> misses;
    const auto step = harness.region_->Stage(0, completed, heads, &misses);
    if (step.ok()) {
      uint64_t asked = 0;
      for (size_t h = 0; h < heads.size(); ++h) {
        asked += BlocksOf(heads[h].retrieved, step->heads[h].retrieved_runs);
        left_out += heads[h].retrieved.size() - step->heads[h].retrieved_runs;
      }
      ASSERT_EQ(step->hit_blocks + step->miss_blocks, asked);
      hits += step->hit_blocks;
      live.push_back({*step, std::move(heads)});
      waiting.push_back(std::move(misses));
    } else {
      ASSERT_EQ(step.status().code(), absl::StatusCode::kResourceExhausted) << step.status();
    }
    while (waiting.size() > random() % 3) {
      harness.region_->Admit(waiting.front());
      waiting.pop_front();
    }
    for (const Live& past : live) {
      ASSERT_EQ(harness.Check(past.step, past.heads), "")
          << "step " << past.step.step << " at " << i;
    }
  }
  EXPECT_GT(hits, 500u);     // Otherwise the cache was never put to the test,
  EXPECT_GT(left_out, 50u);  // nor the end of the ring.
}

TEST(SequenceRegionTest, StepsThatAreNotCompletedStayUntouched) {
  const uint64_t seed = std::random_device{}();
  RunEpochs(Shape(), seed);
  RunEpochs(Shape(33, 57), seed + 1);  // Rows that fill no cache line.
  RunEpochs(Shape(64, 32, DType::kF32), seed + 2);
}

// A region that is closed in the middle of an admission is wiped behind it, not before.
TEST(SequenceRegionTest, CloseWaitsForARunningAdmission) {
  const ModelShape shape = Shape(256, 256, DType::kF32);  // Large blocks, which take a while.
  std::vector<StageHead> heads(1);
  for (uint32_t i = 0; i < 8; ++i) {
    heads[0].retrieved.push_back(RunOf(Rows(shape, i, 32), 5, 4 * i));
  }
  for (int round = 0; round < 40; ++round) {
    Harness harness(shape, Options(1 << 20, 8));
    const auto* first = reinterpret_cast<const std::byte*>(harness.header());
    std::vector<MissedBlock> misses;
    harness.region_->Touch(heads, &misses);
    ASSERT_EQ(misses.size(), 32u);
    const auto* slot = reinterpret_cast<const std::atomic<uint64_t>*>(
        harness.reader_.data() + harness.header()->cache_offset);
    std::thread admitter([&] { harness.region_->Admit(misses); });
    while (slot->load() == 0) {  // Until the first rows arrive.
    }
    harness.region_->Close();
    admitter.join();
    const auto zero = [](std::byte byte) { return byte == std::byte{0}; };
    ASSERT_TRUE(std::all_of(first, first + harness.layout_.region_bytes, zero)) << round;
  }
}

// Steps, look-ups, admissions and the end, all at once.
TEST(SequenceRegionTest, ThreadsDoNotDisturbEachOther) {
  Harness harness(Shape(), Options(32 << 10, 256));
  std::vector<StageHead> heads(1);
  for (uint32_t i = 0; i < 12; ++i) {
    heads[0].retrieved.push_back(RunOf(Rows(harness.shape_, i, 16), 5, 2 * i));
  }
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> touched{0};
  std::thread toucher([&] {
    while (!stop) {
      std::vector<MissedBlock> misses;
      harness.region_->Touch(heads, &misses);
      harness.region_->Admit(misses);
      ++touched;
    }
  });
  uint64_t completed = 0;
  for (int i = 0; i < 2000 || touched < 100; ++i) {
    std::vector<MissedBlock> misses;
    const auto step = harness.region_->Stage(0, completed, heads, &misses);
    ASSERT_TRUE(step.ok()) << step.status();
    ASSERT_EQ(harness.Check(*step, heads), "");
    completed = step->step;
    harness.region_->Admit(misses);
  }
  harness.region_->Close();
  stop = true;
  toucher.join();
}

}  // namespace
}  // namespace wavekv
