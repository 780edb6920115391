// Waiting for a word of shared memory: a bounded spin where that pays, then a futex.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace wavekv::shm {

using TimePoint = std::chrono::steady_clock::time_point;  // CLOCK_MONOTONIC

// How deadlines cross the channel.
uint64_t ToMonotonicNs(TimePoint time);
TimePoint FromMonotonicNs(uint64_t ns);

// Sleeps while `word` holds `expected`, at most `timeout`; may return early. `word` may lie in
// memory that other processes map and write.
void FutexWait(uint32_t* word, uint32_t expected, std::chrono::nanoseconds timeout);
// Wakes whoever sleeps on the word.
void FutexWake(uint32_t* word);

// How many threads of this process may spin at once: one CPU is always left to those that are
// waited for, so on a single CPU nobody spins. Thread-safe.
class SpinSlots {
 public:
  explicit SpinSlots(int usable_cpus) : slots_(usable_cpus - 1) {}
  // The process's own, by the CPUs that it may use at start.
  static SpinSlots* OfProcess();

  bool TryTake() {
    if (slots_.fetch_sub(1, std::memory_order_relaxed) > 0) return true;
    Return();
    return false;
  }
  void Return() { slots_.fetch_add(1, std::memory_order_relaxed); }

 private:
  std::atomic<int> slots_;
};

// Learns how long the waits of one place last, and spins where they are short. Thread-safe: threads
// that share it only blur what it learns.
class AdaptiveSpin {
 public:
  static constexpr std::chrono::nanoseconds kSpinMax = std::chrono::microseconds(50);

  // `slots` must outlive it.
  explicit AdaptiveSpin(SpinSlots* slots) : slots_(slots) {}

  // Spins until ready() or for as long as it is worth. Returns whether it became ready.
  template <class Ready>
  bool Spin(Ready ready) {
    if (ready()) return true;
    if (usual_ns_.load(std::memory_order_relaxed) > kSpinMax.count() || !slots_->TryTake()) {
      return false;
    }
    const TimePoint until = std::chrono::steady_clock::now() + kSpinMax;
    bool done = false;
    do {
      for (int i = 0; i < kLooksPerTime && !done; ++i) {
        Pause();
        done = ready();
      }
    } while (!done && std::chrono::steady_clock::now() < until);
    slots_->Return();
    return done;
  }

  // A wait has lasted so long, asleep or awake.
  void Learn(std::chrono::nanoseconds wait) {
    const int64_t usual = usual_ns_.load(std::memory_order_relaxed);
    const int64_t seen = wait.count() < kLearnMax ? wait.count() : kLearnMax;
    usual_ns_.store(usual + (seen - usual) / 4, std::memory_order_relaxed);
  }

 private:
  static constexpr int kLooksPerTime = 32;  // Reading the clock takes as long as a few looks.
  // Above kSpinMax, but so that a few short waits after a long pause make it spin again.
  static constexpr int64_t kLearnMax = 4 * kSpinMax.count();

  static void Pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  SpinSlots* const slots_;
  std::atomic<int64_t> usual_ns_{0};
};

}  // namespace wavekv::shm
