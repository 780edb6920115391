// Waiting for a word of shared memory: a bounded spin where that pays, then a futex.
#pragma once

#include <algorithm>
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

// Spins where that finds what is waited for. A spin that did not, because the answer takes longer
// or whoever is to give it waits for this very CPU, was time lost: the next is tried after twice as
// many waits as the one before, up to kWaitsSkippedMax. One that did makes good for all.
//
// (How long waits last does not tell: who sleeps sees how long it takes to wake up, so that two
// sides which once were held up would sleep for ever over answers of a few microseconds.)
//
// Thread-safe: threads that share it only blur what it learns.
class AdaptiveSpin {
 public:
  static constexpr std::chrono::nanoseconds kSpinMax = std::chrono::microseconds(50);
  static constexpr uint32_t kWaitsSkippedMax = 63;

  // `slots` must outlive it.
  explicit AdaptiveSpin(SpinSlots* slots) : slots_(slots) {}

  // Spins until ready() or for as long as it is worth. Returns whether it became ready.
  template <class Ready>
  bool Spin(Ready ready) {
    if (ready()) return true;
    if (IsSkipped() || !slots_->TryTake()) return false;
    const TimePoint until = std::chrono::steady_clock::now() + kSpinMax;
    bool done = false;
    do {
      for (int i = 0; i < kLooksPerTime && !done; ++i) {
        Pause();
        done = ready();
      }
    } while (!done && std::chrono::steady_clock::now() < until);
    slots_->Return();
    Learn(done);
    return done;
  }

 private:
  static constexpr int kLooksPerTime = 32;  // Reading the clock takes as long as a few looks.

  bool IsSkipped() {
    const uint32_t left = skipped_left_.load(std::memory_order_relaxed);
    if (left > 0) skipped_left_.store(left - 1, std::memory_order_relaxed);
    return left > 0;
  }

  void Learn(bool found) {
    if (found) return next_skipped_.store(0, std::memory_order_relaxed);
    // After the first in vain none is skipped yet, then 1, 3, 7 ... of them.
    const uint32_t skipped = next_skipped_.load(std::memory_order_relaxed);
    skipped_left_.store(skipped, std::memory_order_relaxed);
    next_skipped_.store(std::min(2 * skipped + 1, kWaitsSkippedMax), std::memory_order_relaxed);
  }

  static void Pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  SpinSlots* const slots_;
  std::atomic<uint32_t> skipped_left_{0};  // Waits not to spin at.
  std::atomic<uint32_t> next_skipped_{0};  // How many, after the next spin in vain.
};

}  // namespace wavekv::shm
