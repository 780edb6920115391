#include "storage/block_pool.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/shared_memory.h"
#include "tests/storage/resident_bytes.h"

namespace wavekv {
namespace {

using testing::HasSubstr;
using testing::Not;

constexpr uint64_t kMiB = uint64_t{1} << 20;
using RunPtr = std::shared_ptr<Run>;  // In a test's body, Run is testing::Test::Run.

std::shared_ptr<Arena> MustCreate(BlockPool* pool, const TenantId& tenant, uint64_t bytes,
                                  std::string label = "seq") {
  auto arena = pool->CreateArena(tenant, bytes, bytes, std::move(label));
  EXPECT_TRUE(arena.ok()) << arena.status();
  return arena.ok() ? *arena : nullptr;
}

RunPtr MustAllocate(Arena* arena, uint64_t bytes) {
  auto run = arena->Allocate(bytes);
  EXPECT_TRUE(run.ok()) << run.status();
  return run.ok() ? *run : nullptr;
}

ptrdiff_t OpenFdCount() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

TEST(BlockPoolTest, RunsAreAlignedDisjointAndKeepTheirBytes) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  auto pool = BlockPool::Create({.bytes_max = 4 * kMiB});
  auto arena = MustCreate(pool.get(), "uid:1", kMiB);
  std::vector<std::pair<RunPtr, uint8_t>> live;
  for (int step = 0; step < 3000; ++step) {
    if (live.empty() || rng() % 100 < 60) {
      auto run = arena->Allocate(1 + rng() % 20000);
      if (!run.ok()) {
        ASSERT_EQ(run.status().code(), absl::StatusCode::kResourceExhausted);
        continue;
      }
      ASSERT_EQ((*run)->offset() % 64, 0u);
      ASSERT_EQ(reinterpret_cast<uintptr_t>((*run)->data()) % 64, 0u);
      ASSERT_LE((*run)->offset() + (*run)->bytes(), arena->arena_bytes());
      const uint8_t tag = static_cast<uint8_t>(rng());
      std::memset((*run)->data(), tag, (*run)->bytes());
      live.emplace_back(*std::move(run), tag);
    } else {
      const size_t victim = rng() % live.size();
      const auto& [run, tag] = live[victim];
      for (uint64_t i = 0; i < run->bytes(); ++i) {
        ASSERT_EQ(std::to_integer<uint8_t>(run->data()[i]), tag) << "another run wrote here";
      }
      live.erase(live.begin() + static_cast<ptrdiff_t>(victim));
    }
    uint64_t bytes = 0, payload = 0;
    for (const auto& [run, tag] : live) {
      bytes += run->bytes();
      payload += run->payload_bytes();
    }
    ASSERT_EQ(pool->Usage().allocated_bytes, bytes);
    ASSERT_EQ(pool->Usage().payload_bytes, payload);
  }
  live.clear();
  EXPECT_EQ(MustAllocate(arena.get(), kMiB)->offset(), 0u) << "all pieces join to one";
}

TEST(BlockPoolTest, LedgerCountsReservationsByTenant) {
  auto pool = BlockPool::Create({.bytes_max = 10 * kMiB, .tenant_bytes_max = 6 * kMiB});
  auto index_too = pool->CreateArena("uid:1", 2 * kMiB, 3 * kMiB, "sequence 1");
  ASSERT_TRUE(index_too.ok()) << index_too.status();
  auto a = MustCreate(pool.get(), "uid:1", kMiB);
  auto b = MustCreate(pool.get(), "uid:2", 5 * kMiB);
  auto run = MustAllocate(b.get(), 100);

  const PoolUsage usage = pool->Usage();
  EXPECT_EQ(usage.bytes_max, 10 * kMiB);
  EXPECT_EQ(usage.reserved_bytes, 9 * kMiB);
  EXPECT_EQ(usage.arena_count, 3u);
  EXPECT_EQ(usage.allocated_bytes, 128u);
  EXPECT_EQ(usage.payload_bytes, 100u);
  const std::vector<TenantUsage> tenants = pool->TenantUsages();
  ASSERT_EQ(tenants.size(), 2u);
  EXPECT_EQ(tenants[0].tenant, "uid:1");
  EXPECT_EQ(tenants[0].bytes_max, 6 * kMiB);
  EXPECT_EQ(tenants[0].usage.reserved_bytes, 4 * kMiB);
  EXPECT_EQ(tenants[0].usage.arena_count, 2u);
  EXPECT_EQ(tenants[1].usage.reserved_bytes, 5 * kMiB);
  EXPECT_EQ(tenants[1].usage.payload_bytes, 100u);

  EXPECT_EQ((*index_too)->arena_bytes(), 2 * kMiB);
  EXPECT_EQ((*index_too)->reserved_bytes(), 3 * kMiB);
}

TEST(BlockPoolTest, TenantLimitNamesItsOwnHoldersOnly) {
  auto pool = BlockPool::Create({.bytes_max = 100 * kMiB, .tenant_bytes_max = 4 * kMiB});
  auto own = MustCreate(pool.get(), "uid:1", 3 * kMiB, "sequence 17");
  auto foreign = MustCreate(pool.get(), "uid:2", 4 * kMiB, "secret project");
  const auto refused = pool->CreateArena("uid:1", 2 * kMiB, 2 * kMiB, "sequence 18");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string text(refused.status().message());
  EXPECT_THAT(text, HasSubstr("asked for 2.00 MiB (2097152 bytes) for 'sequence 18'"));
  EXPECT_THAT(text, HasSubstr("1.00 MiB (1048576 bytes) free of 4.00 MiB"));
  EXPECT_THAT(text, HasSubstr("'sequence 17' 3.00 MiB"));
  EXPECT_THAT(text, HasSubstr("--tenant_bytes_max"));
  EXPECT_THAT(text, Not(HasSubstr("uid:2")));
  // What was refused left no trace; what fits is still granted.
  EXPECT_EQ(pool->Usage().reserved_bytes, 7 * kMiB);
  EXPECT_NE(MustCreate(pool.get(), "uid:1", kMiB), nullptr);
}

// Without a limit of its own a tenant is held by the pool's, and only that flag helps.
TEST(BlockPoolTest, ATenantWithoutALimitIsToldThePools) {
  auto pool = BlockPool::Create({.bytes_max = 4 * kMiB});
  auto own = MustCreate(pool.get(), "uid:1", 3 * kMiB);
  const auto refused = pool->CreateArena("uid:1", 2 * kMiB, 2 * kMiB, "sequence 18");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string text(refused.status().message());
  EXPECT_THAT(text, HasSubstr("--pool_bytes"));
  EXPECT_THAT(text, Not(HasSubstr("--tenant_bytes_max")));
}

TEST(BlockPoolTest, PoolLimitNamesTheLargestHolders) {
  auto pool = BlockPool::Create({.bytes_max = 10 * kMiB});
  std::vector<std::shared_ptr<Arena>> arenas;
  for (int i = 1; i <= 3; ++i) {
    arenas.push_back(MustCreate(pool.get(), absl::StrCat("uid:", i),
                                static_cast<uint64_t>(i) * kMiB, absl::StrCat("label ", i)));
  }
  arenas.push_back(MustCreate(pool.get(), "uid:4", 64 * 1024, "label 4"));
  const auto refused = pool->CreateArena("uid:1", 5 * kMiB, 5 * kMiB, "wanted");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string text(refused.status().message());
  EXPECT_THAT(text, HasSubstr("largest holders: tenant 'uid:3' 3.00 MiB (3145728 bytes), tenant "
                              "'uid:2' 2.00 MiB (2097152 bytes), 'label 1' 1.00 MiB (1048576 "
                              "bytes) and 1 more"));
  EXPECT_THAT(text, Not(HasSubstr("label 3"))) << "labels of other tenants are theirs";
  EXPECT_THAT(text, HasSubstr("--pool_bytes"));
}

TEST(BlockPoolTest, ImpossibleSizesAreRefusedCleanly) {
  auto pool = BlockPool::Create({.bytes_max = 4 * kMiB});
  struct Row {
    const char* why;
    uint64_t arena_bytes;
    uint64_t reserved_bytes;
    absl::StatusCode code;
  };
  const Row rows[] = {
      {"nothing", 0, 0, absl::StatusCode::kInvalidArgument},
      {"no file but a reservation", 0, kMiB, absl::StatusCode::kInvalidArgument},
      {"less reserved than used", kMiB, kMiB - 1, absl::StatusCode::kInvalidArgument},
      {"all there is", ~0ull, ~0ull, absl::StatusCode::kResourceExhausted},
      {"overflows when rounded up", ~0ull - 5, ~0ull - 5, absl::StatusCode::kResourceExhausted},
      {"reservation overflows", 1, ~0ull, absl::StatusCode::kResourceExhausted},
      {"one byte too many", kMiB, 4 * kMiB + 1, absl::StatusCode::kResourceExhausted},
  };
  for (const Row& row : rows) {
    const auto arena = pool->CreateArena("uid:1", row.arena_bytes, row.reserved_bytes, "x");
    EXPECT_EQ(arena.status().code(), row.code) << row.why << ": " << arena.status();
  }
  EXPECT_EQ(pool->Usage().reserved_bytes, 0u);
  EXPECT_EQ(pool->Usage().arena_count, 0u);

  auto arena = MustCreate(pool.get(), "uid:1", 4 * kMiB);
  EXPECT_EQ(arena->Allocate(0).status().code(), absl::StatusCode::kInvalidArgument);
  for (const uint64_t bytes : {uint64_t{4 * kMiB + 1}, ~uint64_t{0}, ~uint64_t{0} - 63}) {
    const auto run = arena->Allocate(bytes);
    EXPECT_EQ(run.status().code(), absl::StatusCode::kResourceExhausted) << bytes;
    EXPECT_THAT(std::string(run.status().message()), HasSubstr("max_tokens"));
  }
  EXPECT_NE(MustAllocate(arena.get(), 4 * kMiB), nullptr);
}

TEST(BlockPoolTest, SmallArenasAreChargedWholePages) {
  auto pool = BlockPool::Create({.bytes_max = kMiB});
  auto arena = MustCreate(pool.get(), "uid:1", 1);
  EXPECT_EQ(arena->arena_bytes() % 4096, 0u);
  EXPECT_EQ(pool->Usage().reserved_bytes, arena->arena_bytes());
}

TEST(BlockPoolTest, PeersReadAndNeverWrite) {
  auto pool = BlockPool::Create({.bytes_max = kMiB});
  auto arena = MustCreate(pool.get(), "uid:1", kMiB);
  auto run = MustAllocate(arena.get(), 4096);
  run->data()[0] = std::byte{1};
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    // As a peer that was sent the descriptor: through /proc, with every way to write tried.
    const int fd = arena->fd();
    const bool wrote =
        ::mmap(nullptr, kMiB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED ||
        ::pwrite(fd, "x", 1, 0) > 0 || ::ftruncate(fd, 0) == 0 ||
        ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0;
    void* view = ::mmap(nullptr, kMiB, PROT_READ, MAP_SHARED, fd, 0);
    const bool read = view != MAP_FAILED && *static_cast<char*>(view) == 1;
    const bool reopened = ::mprotect(view, kMiB, PROT_READ | PROT_WRITE) == 0;
    ::_exit(!wrote && read && !reopened ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT_NE(::madvise(run->data(), 4096, MADV_REMOVE), 0)
      << "not even the owner can give back a part: that is why sequences have arenas";
  run->data()[0] = std::byte{2};  // The owner goes on writing, and the peer would see it.
  auto view = Mapping::Map(arena->fd(), kMiB, Mapping::kReadOnly);
  ASSERT_TRUE(view.ok());
  EXPECT_EQ(view->data()[run->offset()], std::byte{2});
}

TEST(BlockPoolTest, MemoryComesBackWithTheLastRunAndOwner) {
  const ptrdiff_t fds_before = OpenFdCount();
  auto pool = BlockPool::Create({.bytes_max = 8 * kMiB});
  auto arena = MustCreate(pool.get(), "uid:1", 8 * kMiB);
  auto kept = MustAllocate(arena.get(), kMiB);
  auto shared = kept;  // As a fork does.
  std::memset(kept->data(), 1, kMiB);
  arena.reset();
  kept.reset();
  EXPECT_EQ(pool->Usage().reserved_bytes, 8 * kMiB) << "a live run keeps its arena";
  EXPECT_EQ(shared->data()[kMiB - 1], std::byte{1});
  EXPECT_EQ(OpenFdCount(), fds_before + 1);
  shared.reset();
  EXPECT_EQ(pool->Usage().reserved_bytes, 0u);
  EXPECT_EQ(pool->Usage().arena_count, 0u);
  EXPECT_TRUE(pool->TenantUsages().empty());
  EXPECT_EQ(OpenFdCount(), fds_before) << "closing the memfd is what gives the memory back";
  EXPECT_NE(MustCreate(pool.get(), "uid:2", 8 * kMiB), nullptr);
}

TEST(BlockPoolTest, RunsOutliveTheirPoolsOwner) {
  auto pool = BlockPool::Create({.bytes_max = kMiB});
  auto run = MustAllocate(MustCreate(pool.get(), "uid:1", kMiB).get(), 64);
  pool.reset();
  run->data()[0] = std::byte{9};
  EXPECT_EQ(run->arena().tenant(), "uid:1");
}

TEST(BlockPoolTest, FreedRunsAreReusedBeforeNewPagesAreTouched) {
  auto pool = BlockPool::Create({.bytes_max = 64 * kMiB});
  auto arena = MustCreate(pool.get(), "uid:1", 32 * kMiB);
  struct stat info;
  ASSERT_EQ(::fstat(arena->fd(), &info), 0);
  EXPECT_EQ(info.st_blocks, 0) << "an arena starts sparse";
  for (int round = 0; round < 100; ++round) {
    auto run = MustAllocate(arena.get(), kMiB);
    std::memset(run->data(), round, kMiB);
  }
  ASSERT_EQ(::fstat(arena->fd(), &info), 0);
  EXPECT_LE(static_cast<uint64_t>(info.st_blocks) * 512, 2 * kMiB) << "at most one huge page";
}

RunPtr MustAllocatePrivate(Arena* arena, uint64_t bytes) {
  auto run = arena->AllocatePrivate(bytes);
  EXPECT_TRUE(run.ok()) << run.status();
  return run.ok() ? *run : nullptr;
}

TEST(BlockPoolTest, PrivateRunsGiveTheirPagesBack) {
  auto pool = BlockPool::Create({.bytes_max = 64 * kMiB});
  auto arena = MustCreate(pool.get(), "uid:1", 32 * kMiB);
  auto kept = MustAllocatePrivate(arena.get(), kMiB);
  auto run = MustAllocatePrivate(arena.get(), kMiB);
  ASSERT_EQ(run->place(), Run::Place::kPrivate);
  std::byte* const data = run->data();
  std::memset(kept->data(), 5, kMiB);
  std::memset(data, 6, kMiB);
  EXPECT_EQ(ResidentBytes(data, kMiB), kMiB);
  run->Discard(kMiB / 4, kMiB / 2);
  EXPECT_EQ(ResidentBytes(data, kMiB), kMiB / 2);
  EXPECT_EQ(data[kMiB / 4 - 1], std::byte{6});
  EXPECT_EQ(pool->Usage().allocated_bytes, 2 * kMiB);
  run.reset();
  EXPECT_EQ(ResidentBytes(data, kMiB), 0u);
  EXPECT_EQ(ResidentBytes(kept->data(), kMiB), kMiB);
  EXPECT_EQ(kept->data()[kMiB - 1], std::byte{5});
  EXPECT_EQ(pool->Usage().allocated_bytes, kMiB);
  EXPECT_EQ(pool->Usage().payload_bytes, kMiB);
  struct stat info;
  ASSERT_EQ(::fstat(arena->fd(), &info), 0);
  EXPECT_EQ(info.st_blocks, 0) << "nothing of it is in the file that a peer may be sent";
}

TEST(BlockPoolTest, WhatIsInAFileStaysWhenDiscarded) {
  auto pool = BlockPool::Create({.bytes_max = kMiB});
  auto run = MustAllocate(MustCreate(pool.get(), "uid:1", kMiB).get(), 8192);
  std::memset(run->data(), 3, 8192);
  run->Discard(0, 8192);
  EXPECT_EQ(run->data()[4096], std::byte{3});
  EXPECT_DEATH(run->Discard(4096, 4097), "its own");
}

// The pages of file and private memory together are at most the arena's: a file's pages that were
// used once count as long as it lives, and serve private runs where there are no others.
TEST(BlockPoolTest, FileAndPrivateMemoryShareOneLimit) {
  auto pool = BlockPool::Create({.bytes_max = 64 * kMiB});
  auto arena = MustCreate(pool.get(), "uid:1", 8 * kMiB);
  std::vector<RunPtr> in_file, in_private;
  for (int i = 0; i < 5; ++i) in_file.push_back(MustAllocate(arena.get(), kMiB));
  for (int i = 0; i < 3; ++i) in_private.push_back(MustAllocatePrivate(arena.get(), kMiB));
  EXPECT_EQ(arena->Allocate(64).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(arena->AllocatePrivate(64).status().code(), absl::StatusCode::kResourceExhausted);
  in_file[1].reset();  // Its pages stay with the file ...
  auto in_its_place = MustAllocatePrivate(arena.get(), kMiB);
  EXPECT_EQ(in_its_place->place(), Run::Place::kFile);
  EXPECT_EQ(in_its_place->offset(), kMiB);
  in_private[1].reset();  // ... but these go back, and the file may grow by as much.
  auto grown = MustAllocate(arena.get(), kMiB);
  EXPECT_EQ(grown->offset(), 5 * kMiB);
  EXPECT_EQ(arena->AllocatePrivate(64).status().code(), absl::StatusCode::kResourceExhausted);
  in_private.clear();
  in_file.clear();
  EXPECT_EQ(MustAllocatePrivate(arena.get(), 2 * kMiB)->place(), Run::Place::kPrivate);
  EXPECT_EQ(arena->AllocatePrivate(0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(arena->AllocatePrivate(UINT64_MAX).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(BlockPoolTest, PagesNeverPassTheArena) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 rng(seed);
  constexpr uint64_t kArenaBytes = 2 * kMiB;
  auto pool = BlockPool::Create({.bytes_max = kArenaBytes});
  auto arena = MustCreate(pool.get(), "uid:1", kArenaBytes);
  std::vector<std::pair<RunPtr, uint8_t>> live;
  for (int step = 0; step < 2000; ++step) {
    if (live.empty() || rng() % 100 < 60) {
      const uint64_t bytes = 1 + rng() % 100000;
      auto run = rng() % 2 == 0 ? arena->Allocate(bytes) : arena->AllocatePrivate(bytes);
      if (!run.ok()) continue;
      live.emplace_back(*run, static_cast<uint8_t>(rng()));
      std::memset((*run)->data(), live.back().second, bytes);
    } else {
      std::swap(live[rng() % live.size()], live.back());
      for (uint64_t i = 0; i < live.back().first->payload_bytes(); ++i) {
        ASSERT_EQ(live.back().first->data()[i], std::byte{live.back().second});
      }
      live.pop_back();
    }
    uint64_t private_bytes = 0;
    for (const auto& [run, byte] : live) {
      if (run->place() == Run::Place::kPrivate) {
        private_bytes += ResidentBytes(run->data(), run->bytes());
      }
    }
    struct stat info;
    ASSERT_EQ(::fstat(arena->fd(), &info), 0);
    ASSERT_LE(static_cast<uint64_t>(info.st_blocks) * 512 + private_bytes, kArenaBytes);
  }
}

TEST(BlockPoolTest, OverheadOfSegmentsStaysUnderFivePercent) {
  struct Row {
    const char* why;
    uint64_t tokens, key_dim, value_dim, element_bytes;
  };
  const Row rows[] = {
      {"a full segment", 8192, 128, 128, 2},
      {"the smallest segment of decode", 1024, 32, 32, 2},
      {"the smallest a BuildIndex makes, odd count", 1031, 33, 32, 2},
      {"different dims, fp32", 1500, 96, 72, 4},
  };
  for (const Row& row : rows) {
    const uint64_t key_bytes = row.tokens * row.key_dim * row.element_bytes;
    const uint64_t value_bytes = row.tokens * row.value_dim * row.element_bytes;
    const uint64_t segments = 64;
    auto pool = BlockPool::Create({.bytes_max = 1ull << 30});
    const uint64_t payload = segments * (key_bytes + value_bytes);
    auto arena = MustCreate(pool.get(), "uid:1", payload + payload / 20);
    std::vector<RunPtr> runs;
    for (uint64_t i = 0; i < segments; ++i) {
      runs.push_back(MustAllocate(arena.get(), key_bytes));
      runs.push_back(MustAllocate(arena.get(), value_bytes));
    }
    const PoolUsage usage = pool->Usage();
    EXPECT_EQ(usage.payload_bytes, payload) << row.why;
    EXPECT_LE(static_cast<double>(usage.allocated_bytes), 1.05 * static_cast<double>(payload))
        << row.why;
    const uint64_t touched_end = runs.back()->offset() + runs.back()->bytes();
    EXPECT_EQ(touched_end, usage.allocated_bytes) << "runs lie side by side: " << row.why;
  }
}

TEST(BlockPoolTest, ThreadsShareArenasAndLedger) {
  auto pool = BlockPool::Create({.bytes_max = 64 * kMiB, .tenant_bytes_max = 40 * kMiB});
  auto common = MustCreate(pool.get(), "uid:0", 8 * kMiB);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 rng(static_cast<uint32_t>(t));
      for (int round = 0; round < 200; ++round) {
        auto own = pool->CreateArena(absl::StrCat("uid:", t % 2), kMiB, 2 * kMiB, "own");
        ASSERT_TRUE(own.ok()) << own.status();
        std::vector<RunPtr> runs;
        for (int i = 0; i < 8; ++i) {
          Arena* const arena = i % 2 == 0 ? common.get() : own->get();
          auto run = arena->Allocate(1 + rng() % 5000);
          ASSERT_TRUE(run.ok()) << run.status();
          std::memset((*run)->data(), t, (*run)->bytes());
          runs.push_back(*std::move(run));
        }
        own->reset();
        const PoolUsage usage = pool->Usage();
        ASSERT_LE(usage.payload_bytes, usage.allocated_bytes);
        ASSERT_LE(usage.reserved_bytes, usage.bytes_max);
        for (const auto& run : runs) {
          for (uint64_t i = 0; i < run->bytes(); ++i) {
            ASSERT_EQ(std::to_integer<int>(run->data()[i]), t);
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pool->Usage().allocated_bytes, 0u);
  EXPECT_EQ(pool->Usage().reserved_bytes, 8 * kMiB);
}

}  // namespace
}  // namespace wavekv
