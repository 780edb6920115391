// Time, so that tests can turn it.
#pragma once

#include <atomic>
#include <cstdint>

namespace wavekv {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  // Milliseconds since an arbitrary start; never goes back, unrelated to the wall clock.
  virtual int64_t NowMs() const = 0;
};

// CLOCK_MONOTONIC. Lives as long as the process.
Clock* RealClock();

// Milliseconds since 1970, for people only: it jumps.
int64_t WallTimeMs();

class FakeClock : public Clock {
 public:
  explicit FakeClock(int64_t now_ms = 1000) : now_ms_(now_ms) {}
  int64_t NowMs() const override { return now_ms_.load(); }
  void AdvanceMs(int64_t delta_ms) { now_ms_.fetch_add(delta_ms); }

 private:
  std::atomic<int64_t> now_ms_;
};

}  // namespace wavekv
