// A fixed number of threads, a bounded queue of tasks, and loops shared with the caller.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "storage/base/mutex.h"

namespace wavekv {

struct ThreadPoolOptions {
  int thread_count = 1;     // At least 0; with 0, ParallelFor runs in the caller alone.
  std::string name;         // Of the threads: the first 15 bytes show in ps and gdb.
  size_t queue_max = 1024;  // Tasks waiting; loops do not count.
  int nice = 0;             // Added to the process's; above 0 for work that should give way.
  bool on_demand = false;   // Threads start with the first task or loop, all of them.
};

// Thread-safe. Destruction runs what was accepted, then joins; nobody may submit meanwhile.
class ThreadPool {
 public:
  explicit ThreadPool(const ThreadPoolOptions& options);
  ThreadPool(int thread_count, std::string name)
      : ThreadPool(ThreadPoolOptions{.thread_count = thread_count, .name = std::move(name)}) {}
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Queues `task`. ResourceExhausted when queue_max tasks wait already, or there are no threads:
  // the pool has none, or the system gave none when they were to start.
  absl::Status TrySubmit(std::function<void()> task);

  // Queues `task`, waiting for room. On a thread of this pool, or in a pool without threads, a
  // task that finds no room runs at once in the caller, as waiting could be for ever.
  void Submit(std::function<void()> task);

  // Runs fn(0) ... fn(count - 1), each once, in any order, and returns when all are done. The
  // caller takes part and needs no thread of the pool, so it finishes however busy the pool is and
  // may be called from inside it. What the calls write is visible to the caller afterwards.
  void ParallelFor(size_t count, const std::function<void(size_t)>& fn);

  // Once all have started.
  int thread_count() const { return thread_count_; }
  // Tasks waiting.
  size_t queue_size() const;

 private:
  struct Loop;

  // Starts the threads that do not run. False: there are none.
  bool EnsureThreads() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunThread();
  bool OnPoolThread() const;

  const int thread_count_;
  const std::string name_;
  const size_t queue_max_;
  const int nice_;
  mutable Mutex mutex_;
  CondVar work_;  // Something to do, or stopping.
  CondVar room_;  // A task left the queue.
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  // Loops that may have iterations left; threads serve them first, as somebody waits for them.
  std::deque<std::shared_ptr<Loop>> loops_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int started_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<std::thread> threads_ ABSL_GUARDED_BY(mutex_);  // Until destruction takes them.
};

}  // namespace wavekv
