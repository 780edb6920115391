#include "storage/base/clock.h"

#include <chrono>

namespace wavekv {
namespace {

class SteadyClock : public Clock {
 public:
  int64_t NowMs() const override {
    return std::chrono::duration_cast<std::chrono::milliseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

}  // namespace

Clock* RealClock() {
  static SteadyClock* const clock = new SteadyClock;  // Never destroyed: threads may outlive main.
  return clock;
}

int64_t WallTimeMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace wavekv
