#include "daemon/engine/resident_terms.h"

#include <poll.h>

#include <utility>

#include "absl/strings/str_cat.h"

namespace wavekv {

absl::Status ResidentProcess::Bind(int64_t pid, UniqueFd pidfd) {
  if (!pidfd.valid()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the kernel has no pidfd of process ", pid,
        ", whose end must be noticed; let it share wavekvd's process-id namespace, or run Linux "
        "6.5 or later"));
  }
  MutexLock lock(&mutex_);
  if (closed_) return absl::FailedPreconditionError("the attachment has ended; attach again");
  if (pidfd_.valid() && pid_ != pid) {
    return absl::FailedPreconditionError(absl::StrCat("the sequence is attached by process ", pid_,
                                                      ", process ", pid, " has no part in it"));
  }
  if (!pidfd_.valid()) pidfd_ = std::move(pidfd);
  pid_ = pid;
  return absl::OkStatus();
}

void ResidentProcess::Close() {
  MutexLock lock(&mutex_);
  closed_ = true;
}

bool ResidentProcess::Died() const {
  MutexLock lock(&mutex_);
  if (!pidfd_.valid()) return false;
  pollfd process{pidfd_.get(), POLLIN, 0};
  return poll(&process, 1, 0) == 1;
}

bool ResidentProcess::Gone() const {
  {
    MutexLock lock(&mutex_);
    if (!pidfd_.valid()) return true;
  }
  return Died();
}

ResidentCounters& operator+=(ResidentCounters& sum, const ResidentCounters& other) {
  sum.hit_blocks += other.hit_blocks;
  sum.miss_blocks += other.miss_blocks;
  sum.overflows += other.overflows;
  sum.violations += other.violations;
  sum.log_losses += other.log_losses;
  return sum;
}

}  // namespace wavekv
