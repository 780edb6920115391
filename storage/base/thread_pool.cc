#include "storage/base/thread_pool.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// The pool the calling thread belongs to.
thread_local const ThreadPool* current_pool = nullptr;

}  // namespace

// One ParallelFor. `fn` is the caller's and is touched only for a claimed index below count, which
// keeps the caller inside ParallelFor.
struct ThreadPool::Loop {
  const size_t count;
  const std::function<void(size_t)>* const fn;
  std::atomic<size_t> next = 0;  // First index nobody has claimed; may pass count.
  std::atomic<size_t> done = 0;
  Mutex mutex;
  CondVar finished;

  Loop(size_t loop_count, const std::function<void(size_t)>* loop_fn)
      : count(loop_count), fn(loop_fn) {}

  // Claims and runs indices until none is left.
  void Work() {
    size_t ran = 0;
    for (size_t i = next.fetch_add(1, std::memory_order_relaxed); i < count;
         i = next.fetch_add(1, std::memory_order_relaxed)) {
      (*fn)(i);
      ++ran;
    }
    // Release: what fn wrote is visible to the caller, which reads `done` with acquire.
    if (ran > 0 && done.fetch_add(ran, std::memory_order_acq_rel) + ran == count) {
      MutexLock lock(&mutex);
      finished.NotifyAll();
    }
  }

  void Wait() {
    if (done.load(std::memory_order_acquire) == count) return;
    MutexLock lock(&mutex);
    while (done.load(std::memory_order_acquire) != count) finished.Wait(&mutex);
  }
};

ThreadPool::ThreadPool(const ThreadPoolOptions& options)
    : thread_count_(options.thread_count),
      name_(options.name.substr(0, 15)),
      queue_max_(options.queue_max),
      nice_(options.nice) {
  WAVEKV_CHECK(options.thread_count >= 0, "a thread pool cannot have fewer than 0 threads");
  if (options.on_demand) return;
  MutexLock lock(&mutex_);
  for (int i = 0; i < thread_count_; ++i) StartThread();
}

ThreadPool::~ThreadPool() {
  std::vector<std::thread> threads;
  {
    MutexLock lock(&mutex_);
    WAVEKV_CHECK(loops_.empty(), "a thread pool was destroyed inside a ParallelFor");
    stopping_ = true;
    threads.swap(threads_);
  }
  work_.NotifyAll();
  for (std::thread& thread : threads) thread.join();
}

void ThreadPool::StartThread() {
  threads_.emplace_back([this] { RunThread(); });
  ++started_;
}

bool ThreadPool::EnsureThreads() {
  try {
    while (started_ < thread_count_) StartThread();
  } catch (const std::system_error&) {
    // Fewer do as well until the next time; with none the caller is told.
  }
  return started_ > 0;
}

absl::Status ThreadPool::TrySubmit(std::function<void()> task) {
  {
    MutexLock lock(&mutex_);
    if (!EnsureThreads() || tasks_.size() >= queue_max_) {
      return absl::ResourceExhaustedError(absl::StrCat("thread pool: ", tasks_.size(),
                                                       " tasks wait for ", started_,
                                                       " threads, at most ", queue_max_, " may"));
    }
    tasks_.push_back(std::move(task));
  }
  work_.NotifyOne();
  return absl::OkStatus();
}

void ThreadPool::Submit(std::function<void()> task) {
  {
    MutexLock lock(&mutex_);
    const bool has_threads = EnsureThreads();
    const bool may_wait = has_threads && !OnPoolThread();
    while (may_wait && tasks_.size() >= queue_max_) room_.Wait(&mutex_);
    if (has_threads && tasks_.size() < queue_max_) {
      tasks_.push_back(std::move(task));
      task = nullptr;
    }
  }
  if (task == nullptr) {
    work_.NotifyOne();
  } else {
    task();
  }
}

void ThreadPool::ParallelFor(size_t count, const std::function<void(size_t)>& fn) {
  const size_t helpers = std::min(count == 0 ? 0 : count - 1, static_cast<size_t>(thread_count_));
  if (helpers == 0) {
    for (size_t i = 0; i < count; ++i) fn(i);
    return;
  }
  const auto loop = std::make_shared<Loop>(count, &fn);
  {
    MutexLock lock(&mutex_);
    (void)EnsureThreads();  // Without any the caller does all of it.
    loops_.push_back(loop);
  }
  for (size_t i = 0; i < helpers; ++i) work_.NotifyOne();
  loop->Work();
  {
    MutexLock lock(&mutex_);
    std::erase(loops_, loop);
  }
  loop->Wait();
}

size_t ThreadPool::queue_size() const {
  MutexLock lock(&mutex_);
  return tasks_.size();
}

bool ThreadPool::OnPoolThread() const { return current_pool == this; }

void ThreadPool::RunThread() {
  current_pool = this;
  ::pthread_setname_np(::pthread_self(), name_.c_str());
  // Linux keeps a nice value per thread. A refusal costs priority, not correctness.
  if (nice_ != 0) {
    const id_t thread = static_cast<id_t>(::syscall(SYS_gettid));
    ::setpriority(PRIO_PROCESS, thread, ::getpriority(PRIO_PROCESS, thread) + nice_);
  }
  while (true) {
    std::shared_ptr<Loop> loop;
    std::function<void()> task;
    {
      MutexLock lock(&mutex_);
      while (tasks_.empty() && loops_.empty() && !stopping_) work_.Wait(&mutex_);
      if (!loops_.empty()) {
        loop = loops_.front();
      } else if (!tasks_.empty()) {
        task = std::move(tasks_.front());
        tasks_.pop_front();
      } else {
        return;
      }
    }
    if (loop != nullptr) {
      loop->Work();
      // Every index is claimed now: nobody else need look at it.
      MutexLock lock(&mutex_);
      std::erase(loops_, loop);
    } else {
      room_.NotifyOne();
      task();
    }
  }
}

}  // namespace wavekv
