#include "storage/base/thread_pool.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "storage/base/mutex.h"

namespace wavekv {
namespace {

// Happens once. May be destroyed as soon as Wait has returned, which a std::promise may not.
class Event {
 public:
  void Set() {
    MutexLock lock(&mutex_);
    is_set_ = true;
    changed_.NotifyAll();
  }
  void Wait() {
    MutexLock lock(&mutex_);
    while (!is_set_) changed_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool is_set_ ABSL_GUARDED_BY(mutex_) = false;
};

// Keeps every thread of a pool busy until released; must outlive the pool.
class Blocker {
 public:
  void Block(ThreadPool* pool) {
    std::vector<Event> started(static_cast<size_t>(pool->thread_count()));
    for (Event& event : started) {
      pool->Submit([this, &event] {
        event.Set();
        gate_.Wait();
      });
    }
    for (Event& event : started) event.Wait();
  }
  void Release() { gate_.Set(); }

 private:
  Event gate_;
};

TEST(ThreadPoolTest, RunsEveryTaskBeforeItIsGone) {
  std::atomic<int> ran = 0;
  {
    ThreadPool pool(3, "test");
    for (int i = 0; i < 1000; ++i) pool.Submit([&] { ran.fetch_add(1); });
  }
  EXPECT_EQ(ran.load(), 1000);
}

TEST(ThreadPoolTest, FullQueueIsAnError) {
  Blocker blocker;
  std::atomic<int> ran = 0;
  Event last;
  ThreadPool pool({.thread_count = 2, .name = "test", .queue_max = 3});
  blocker.Block(&pool);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(pool.TrySubmit([&] { ran.fetch_add(1); }).ok());
  EXPECT_EQ(pool.queue_size(), 3u);
  const absl::Status full = pool.TrySubmit([&] { ran.fetch_add(100); });
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("at most 3"), absl::string_view::npos) << full;
  blocker.Release();
  pool.Submit([&] { ran.fetch_add(1); });  // Waits for room if it has to.
  pool.Submit([&] { last.Set(); });
  last.Wait();
}

TEST(ThreadPoolTest, ParallelForRunsEachIndexOnce) {
  ThreadPool pool(3, "test");
  for (const size_t count : {0, 1, 2, 3, 4, 17, 1000}) {
    std::vector<int> hits(count, 0);  // Not atomic: TSan sees it if the hand-over is unordered.
    pool.ParallelFor(count, [&](size_t i) { ++hits[i]; });
    for (size_t i = 0; i < count; ++i) EXPECT_EQ(hits[i], 1) << i << " of " << count;
  }
}

TEST(ThreadPoolTest, ParallelForFinishesWhileThePoolIsBusyAndItsQueueFull) {
  Blocker blocker;
  ThreadPool pool({.thread_count = 2, .name = "test", .queue_max = 1});
  blocker.Block(&pool);
  ASSERT_TRUE(pool.TrySubmit([] {}).ok());
  std::atomic<int> ran = 0;
  pool.ParallelFor(64, [&](size_t) { ran.fetch_add(1); });
  EXPECT_EQ(ran.load(), 64);
  EXPECT_EQ(pool.queue_size(), 1u) << "a loop leaves nothing in the queue";
  blocker.Release();
}

TEST(ThreadPoolTest, ParallelForNestsInsideThePool) {
  ThreadPool pool({.thread_count = 2, .name = "test", .queue_max = 1});
  std::atomic<int> ran = 0;
  Event done;
  pool.Submit([&] {
    pool.ParallelFor(8, [&](size_t) {
      pool.ParallelFor(8, [&](size_t) { pool.ParallelFor(2, [&](size_t) { ran.fetch_add(1); }); });
    });
    done.Set();
  });
  done.Wait();
  EXPECT_EQ(ran.load(), 128);
}

TEST(ThreadPoolTest, ThreadsReallyHelp) {
  ThreadPool pool(1, "test");
  Event met[2];
  // Each of the two iterations waits for the other: only two threads at once get through.
  pool.ParallelFor(2, [&](size_t i) {
    met[i].Set();
    met[1 - i].Wait();
  });
}

TEST(ThreadPoolTest, ManyCallersShareOnePool) {
  ThreadPool pool(2, "test");
  std::vector<std::thread> callers;
  std::atomic<uint64_t> sum = 0;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        std::vector<uint64_t> part(16);
        pool.ParallelFor(part.size(), [&](size_t i) { part[i] = i; });
        sum.fetch_add(std::accumulate(part.begin(), part.end(), uint64_t{0}));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sum.load(), 4u * 200 * 120);
}

TEST(ThreadPoolTest, SubmitFromItsOwnThreadNeverWaits) {
  std::atomic<int> ran = 0;
  int ran_at_once = 0;
  Event done;
  ThreadPool pool({.thread_count = 1, .name = "test", .queue_max = 1});
  pool.Submit([&] {
    for (int i = 0; i < 5; ++i) pool.Submit([&] { ran.fetch_add(1); });
    ran_at_once = ran.load();
    done.Set();
  });
  done.Wait();
  EXPECT_EQ(ran_at_once, 4) << "one fits the queue, the others run in place";
}

TEST(ThreadPoolTest, PoolWithoutThreadsWorksInTheCaller) {
  ThreadPool pool(0, "test");
  int ran = 0;
  pool.Submit([&] { ++ran; });
  pool.ParallelFor(3, [&](size_t) { ++ran; });
  EXPECT_EQ(ran, 4);
  EXPECT_FALSE(pool.TrySubmit([] {}).ok());
}

TEST(ThreadPoolTest, WhatWasAcceptedMaySubmitMoreAtItsEnd) {
  std::atomic<int> ran = 0;
  {
    ThreadPool pool(2, "test");
    for (int i = 0; i < 100; ++i) {
      pool.Submit([&] { pool.Submit([&] { ran.fetch_add(1); }); });
    }
  }
  EXPECT_EQ(ran.load(), 100);
}

// Of this process, of that name.
int Threads(const std::string& name) {
  int count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string found;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, found);
    count += found == name ? 1 : 0;
  }
  return count;
}

TEST(ThreadPoolTest, OnDemandThereAreNoThreadsBeforeTheFirstTask) {
  Event met[2];
  std::atomic<int> ran = 0;
  {
    ThreadPool pool({.thread_count = 2, .name = "on-demand", .on_demand = true});
    EXPECT_EQ(Threads("on-demand"), 0);
    EXPECT_EQ(pool.thread_count(), 2);
    // Each waits for the other: both threads are there.
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(pool.TrySubmit([&, i] {
                        met[i].Set();
                        met[1 - i].Wait();
                        ran.fetch_add(1);
                      })
                      .ok());
    }
    met[0].Wait();
    met[1].Wait();
    EXPECT_EQ(Threads("on-demand"), 2);
  }
  EXPECT_EQ(ran.load(), 2);
  ThreadPool for_a_loop({.thread_count = 1, .name = "test", .on_demand = true});
  Event together[2];
  for_a_loop.ParallelFor(2, [&](size_t i) {
    together[i].Set();
    together[1 - i].Wait();
  });
  // Never asked for anything, and gone.
  const ThreadPool idle({.thread_count = 2, .name = "test", .on_demand = true});
}

TEST(ThreadPoolTest, ThreadsCarryNameAndNiceValue) {
  ThreadPool pool({.thread_count = 1, .name = "a-name-longer-than-15-bytes", .nice = 7});
  char name[16] = {};
  int nice = 0;
  Event done;
  pool.Submit([&] {
    ::pthread_getname_np(::pthread_self(), name, sizeof(name));
    nice = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)));
    done.Set();
  });
  done.Wait();
  EXPECT_STREQ(name, "a-name-longer-t");
  EXPECT_EQ(nice, ::getpriority(PRIO_PROCESS, 0) + 7);
}

}  // namespace
}  // namespace wavekv
