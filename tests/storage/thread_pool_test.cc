#include "storage/base/thread_pool.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

// Keeps every thread of a pool busy until released.
class Blocker {
 public:
  explicit Blocker(ThreadPool* pool) {
    std::vector<std::promise<void>> started(static_cast<size_t>(pool->thread_count()));
    for (std::promise<void>& promise : started) {
      pool->Submit([this, &promise] {
        promise.set_value();
        gate_.wait();
      });
    }
    for (std::promise<void>& promise : started) promise.get_future().wait();
  }
  ~Blocker() { Release(); }
  void Release() {
    if (!released_) open_.set_value();
    released_ = true;
  }

 private:
  std::promise<void> open_;
  std::shared_future<void> gate_ = open_.get_future().share();
  bool released_ = false;
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
  ThreadPool pool({.thread_count = 2, .name = "test", .queue_max = 3});
  Blocker blocker(&pool);
  std::atomic<int> ran = 0;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(pool.TrySubmit([&] { ran.fetch_add(1); }).ok());
  EXPECT_EQ(pool.queue_size(), 3u);
  const absl::Status full = pool.TrySubmit([&] { ran.fetch_add(100); });
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(full.message().find("at most 3"), absl::string_view::npos) << full;
  blocker.Release();
  pool.Submit([&] { ran.fetch_add(1); });  // Waits for room if it has to.
  std::promise<void> last;
  pool.Submit([&] { last.set_value(); });
  last.get_future().wait();
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
  ThreadPool pool({.thread_count = 2, .name = "test", .queue_max = 1});
  Blocker blocker(&pool);
  ASSERT_TRUE(pool.TrySubmit([] {}).ok());
  std::atomic<int> ran = 0;
  pool.ParallelFor(64, [&](size_t) { ran.fetch_add(1); });
  EXPECT_EQ(ran.load(), 64);
  EXPECT_EQ(pool.queue_size(), 1u) << "a loop leaves nothing in the queue";
}

TEST(ThreadPoolTest, ParallelForNestsInsideThePool) {
  ThreadPool pool({.thread_count = 2, .name = "test", .queue_max = 1});
  std::atomic<int> ran = 0;
  std::promise<void> done;
  pool.Submit([&] {
    pool.ParallelFor(8, [&](size_t) {
      pool.ParallelFor(8, [&](size_t) { pool.ParallelFor(2, [&](size_t) { ran.fetch_add(1); }); });
    });
    done.set_value();
  });
  done.get_future().wait();
  EXPECT_EQ(ran.load(), 128);
}

TEST(ThreadPoolTest, ThreadsReallyHelp) {
  ThreadPool pool(1, "test");
  std::promise<void> met[2];
  // Each of the two iterations waits for the other: only two threads at once get through.
  pool.ParallelFor(2, [&](size_t i) {
    met[i].set_value();
    met[1 - i].get_future().wait();
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
  ThreadPool pool({.thread_count = 1, .name = "test", .queue_max = 1});
  std::promise<int> done;
  pool.Submit([&] {
    int ran_at_once = 0;
    auto counter = std::make_shared<std::atomic<int>>(0);
    for (int i = 0; i < 5; ++i) pool.Submit([counter] { counter->fetch_add(1); });
    ran_at_once = counter->load();
    done.set_value(ran_at_once);
  });
  EXPECT_EQ(done.get_future().get(), 4) << "one fits the queue, the others run in place";
}

TEST(ThreadPoolTest, PoolWithoutThreadsWorksInTheCaller) {
  ThreadPool pool(0, "test");
  int ran = 0;
  pool.Submit([&] { ++ran; });
  pool.ParallelFor(3, [&](size_t) { ++ran; });
  EXPECT_EQ(ran, 4);
  EXPECT_FALSE(pool.TrySubmit([] {}).ok());
}

TEST(ThreadPoolTest, ThreadsCarryNameAndNiceValue) {
  ThreadPool pool({.thread_count = 1, .name = "a-name-longer-than-15-bytes", .nice = 7});
  std::promise<std::pair<std::string, int>> seen;
  pool.Submit([&] {
    char name[16] = {};
    ::pthread_getname_np(::pthread_self(), name, sizeof(name));
    seen.set_value({name, ::getpriority(PRIO_PROCESS, ::syscall(SYS_gettid))});
  });
  const auto [name, nice] = seen.get_future().get();
  EXPECT_EQ(name, "a-name-longer-t");
  EXPECT_EQ(nice, ::getpriority(PRIO_PROCESS, 0) + 7);
}

}  // namespace
}  // namespace wavekv
