#include "proto/shm/waiting.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "storage/base/cpuset.h"

namespace wavekv::shm {

uint64_t ToMonotonicNs(TimePoint time) {
  const int64_t ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  return ns < 0 ? 0 : static_cast<uint64_t>(ns);
}

TimePoint FromMonotonicNs(uint64_t ns) {
  const auto bounded = static_cast<int64_t>(std::min<uint64_t>(ns, INT64_MAX));
  return TimePoint(std::chrono::nanoseconds(bounded));
}

void FutexWait(uint32_t* word, uint32_t expected, std::chrono::nanoseconds timeout) {
  const int64_t ns = std::max<int64_t>(timeout.count(), 0);
  const timespec wait{static_cast<time_t>(ns / 1'000'000'000),
                      static_cast<long>(ns % 1'000'000'000)};
  // Every result, a timeout and an interruption included, means: look again.
  ::syscall(SYS_futex, word, FUTEX_WAIT, expected, &wait, nullptr, 0);
}

void FutexWake(uint32_t* word) {
  ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

SpinSlots* SpinSlots::OfProcess() {
  static SpinSlots slots(UsableCpuCount());
  return &slots;
}

}  // namespace wavekv::shm
