// Many threads on few sequences. The answers are checked where they can be known; the rest is
// ThreadSanitizer's.
#include <atomic>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

constexpr double kExactTolerance = 1e-4;
constexpr ZoneBudget kAllClusters = {.kind = BudgetKind::kRatio, .value = 1.0};

class ConcurrencyTest : public EngineTest {};

// One writer decodes; readers attend over everything. Whatever they see is a prefix of the tokens,
// exact to the last.
TEST_F(ConcurrencyTest, ReadersSeePrefixes) {
  const uint64_t seed = FreshSeed();
  spec_.shape.layer_count = 1;
  const uint64_t total = 2600;
  const TokenData data(shape(), total, seed);
  const SequenceRef sequence = Filled(data, 300);
  std::atomic<bool> done = false;
  std::atomic<uint64_t> answers = 0;
  std::vector<std::thread> readers;
  for (int reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&, reader] {
      uint64_t last_count = 0;
      for (uint64_t draw = 0; !done; ++draw) {
        const std::vector<float> queries = RandomQueries(shape(), seed + 10 * draw + reader);
        const AttendOutcome found = Attend(sequence, 0, queries, false, kAllClusters);
        ASSERT_TRUE(found.status.ok()) << found.status;
        ASSERT_GE(found.token_count, last_count);
        last_count = found.token_count;
        ASSERT_EQ(found.counters.steady_tokens + found.counters.retrieved_tokens,
                  found.token_count * shape().kv_head_count);
        if (draw % 8 != 0) continue;  // The oracle is slow.
        ASSERT_LT(
            RelativeError(shape(), found.out, ExactOracle(data, 0, found.token_count, queries).out),
            kExactTolerance);
        ++answers;
      }
    });
  }
  for (uint64_t position = 300; position < total; ++position) {
    Insert(sequence, data, position, 1);
    if (position % 500 == 0) Build(sequence);
  }
  done = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_GT(answers.load(), 0u);
  Build(sequence);
  const SequenceRef fresh = Filled(data, total);
  EXPECT_TRUE(Fingerprint(sequence, seed) == Fingerprint(fresh, seed));
}

// Everything at once on shared sequences. Calls may be refused, never wrong: an accepted answer
// covers each of its tokens once, and nothing is left in the end.
TEST_F(ConcurrencyTest, EverythingAtOnce) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 3000, seed);
  constexpr int kThreads = 4;
  constexpr int kRounds = 6;
  const SequenceRef shared = Create(spec_);
  Insert(shared, data, 0, 1500);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < kRounds; ++round) {
        const uint64_t draw = seed + static_cast<uint64_t>(100 * t + round);
        const std::vector<float> queries = RandomQueries(shape(), draw);
        // The shared sequence: whole appends and truncations, whoever comes first.
        const SequenceStatus now = StatusOf({shared.id, Generation(0)});
        const SequenceRef current = {shared.id, now.generation};
        switch ((t + round) % 4) {
          case 0: {
            const ChunkBuffers more(data, current, {0, 1}, now.token_count, 40);
            engine_->Insert(kTenant, more.chunk).status().IgnoreError();
            break;
          }
          case 1:
            engine_->TruncateSequence(kTenant, current, now.token_count - draw % 200)
                .status()
                .IgnoreError();
            break;
          case 2:
            engine_->BuildIndex(kTenant, current, nullptr).status().IgnoreError();
            break;
          default:
            engine_->DescribeIndex(kTenant, current, std::nullopt, std::nullopt)
                .status()
                .IgnoreError();
        }
        const AttendOutcome found =
            Attend({shared.id, Generation(0)}, 1, queries, false, kAllClusters);
        ASSERT_TRUE(found.status.ok()) << found.status;
        ASSERT_EQ(found.counters.steady_tokens + found.counters.retrieved_tokens,
                  found.token_count * shape().kv_head_count);
        for (const float x : found.out) ASSERT_TRUE(std::isfinite(x));
        // A fork of its own, which nobody else changes.
        const auto forked =
            engine_->ForkSequence(kTenant, kOwner, {shared.id, Generation(0)}, 0, 0, "fork");
        ASSERT_TRUE(forked.ok()) << forked.status();
        SequenceRef fork = {forked->id, forked->generation};
        Insert(fork, data, forked->token_count, 150);
        const auto cut = engine_->TruncateSequence(kTenant, fork, forked->token_count + 20);
        ASSERT_TRUE(cut.ok()) << cut.status();
        fork.generation = cut->generation;
        const AttendOutcome exact = Attend(fork, 0, queries, /*exact=*/true);
        ASSERT_TRUE(exact.status.ok()) << exact.status;
        ASSERT_LT(
            RelativeError(shape(), exact.out, ExactOracle(data, 0, cut->token_count, queries).out),
            kExactTolerance);
        ASSERT_TRUE(engine_->DropSequence(kTenant, fork).ok());
        engine_->Stats();
        engine_->Reap();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(engine_->DropSequence(kTenant, {shared.id, Generation(0)}).ok());
  while (pool_->Usage().reserved_bytes > 0) std::this_thread::yield();
  EXPECT_EQ(engine_->Stats().index_bytes, 0u);
  EXPECT_TRUE(engine_->ListSequences("", SequenceId(0), 10).empty());
}

// A sequence is dropped under running calls: they finish or are refused; none reads freed memory.
TEST_F(ConcurrencyTest, DropUnderRunningCalls) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1400, seed);
  for (int round = 0; round < 5; ++round) {
    const SequenceRef sequence = Create(spec_);
    Insert(sequence, data, 0, 1300);
    std::atomic<int> running = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        const std::vector<float> queries = RandomQueries(shape(), seed + static_cast<uint64_t>(t));
        const OracleAnswer expected = ExactOracle(data, 0, 1300, queries);
        ++running;
        for (;;) {
          const AttendOutcome found = Attend(sequence, 0, queries, /*exact=*/true);
          if (!found.status.ok()) {
            EXPECT_EQ(found.status.code(), absl::StatusCode::kNotFound) << found.status;
            return;
          }
          ASSERT_LT(RelativeError(shape(), found.out, expected.out), kExactTolerance);
        }
      });
    }
    while (running < 3) std::this_thread::yield();
    ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
    for (std::thread& thread : threads) thread.join();
  }
  while (pool_->Usage().reserved_bytes > 0) std::this_thread::yield();
}

size_t ThreadCount() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

// FAULTS 24: 32 callers take part in their own work and start no threads.
TEST_F(ConcurrencyTest, ThreadsAreBounded) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1500, seed);
  const SequenceRef sequence = Filled(data, 1500);
  const std::vector<float> queries = RandomQueries(shape(), seed);
  const AttendOutcome expected = Attend(sequence, 0, queries);
  const size_t threads_before = ThreadCount();
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 32; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 5; ++i) {
        const AttendOutcome found = Attend(sequence, 0, queries);
        ASSERT_TRUE(found.status.ok()) << found.status;
        ASSERT_EQ(found.out, expected.out) << "the same bits on any number of threads";
        ASSERT_LE(ThreadCount(), threads_before + 32);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace wavekv::testing
