#include "gpu/host_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/mutex.h"
#include "storage/base/shared_memory.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// An open file description of its own, read-only. The one that memfd_create made is writable, and
// a duplicate of it would be too.
absl::StatusOr<UniqueFd> ReopenReadOnly(int fd) {
  const std::string path = absl::StrCat("/proc/self/fd/", fd);
  UniqueFd reopened(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!reopened.valid()) {
    return absl::ErrnoToStatus(
        errno, "cannot reopen a memfd read-only through /proc, which must be mounted");
  }
  return reopened;
}

class HostAllocation : public DeviceAllocation {
 public:
  HostAllocation(UniqueFd fd, UniqueFd probe, uint64_t bytes)
      : bytes_(bytes), fd_(std::move(fd)), probe_(std::move(probe)) {}

  uint64_t bytes() const override { return bytes_; }

  absl::StatusOr<UniqueFd> WritableDescriptor() override {
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(CheckHeld());
    UniqueFd copy(::fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
    if (!copy.valid()) return absl::ErrnoToStatus(errno, "cannot duplicate a memfd");
    return copy;
  }

  absl::StatusOr<UniqueFd> ReadOnlyDescriptor() override {
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(CheckHeld());
    return ReopenReadOnly(fd_.get());
  }

  absl::Status Seal() override {
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(CheckHeld());
    return SealForReaders(fd_.get());
  }

  absl::StatusOr<std::shared_ptr<KeptPeer>> NewHolder() override {
    return std::shared_ptr<KeptPeer>();
  }

  void Drop() override {
    MutexLock lock(&mutex_);
    fd_.reset();
  }

  // The kernel grants a write lease only when nobody else has the file open or mapped: it is the
  // one way to ask that question about a file without a name. Where it knows no such leases, say
  // no: the memory is then counted as free a little early.
  bool HeldByReaders() const override {
    if (::fcntl(probe_.get(), F_SETLEASE, F_WRLCK) != 0) return errno == EAGAIN;
    (void)::fcntl(probe_.get(), F_SETLEASE, F_UNLCK);
    return false;
  }

 private:
  absl::Status CheckHeld() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (fd_.valid()) return absl::OkStatus();
    return absl::NotFoundError("the allocation was released");
  }

  const uint64_t bytes_;
  Mutex mutex_;
  UniqueFd fd_ ABSL_GUARDED_BY(mutex_);
  const UniqueFd probe_;  // Read-only; the handle that asks for the lease.
};

class HostMemory : public DeviceMemory {
 public:
  std::string backend() const override { return "host"; }
  std::string device_uuid() const override { return "host"; }
  bool pinned() const override { return false; }
  uint64_t allocation_unit_bytes() const override {
    return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  }
  uint64_t overhead_bytes() const override { return 0; }

  absl::StatusOr<std::unique_ptr<DeviceAllocation>> Allocate(const std::string& name,
                                                             uint64_t bytes) override {
    WAVEKV_ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd(name, bytes));
    WAVEKV_RETURN_IF_ERROR(SealSize(fd.get()));
    WAVEKV_ASSIGN_OR_RETURN(UniqueFd probe, ReopenReadOnly(fd.get()));
    return std::make_unique<HostAllocation>(std::move(fd), std::move(probe), bytes);
  }
};

}  // namespace

std::unique_ptr<DeviceMemory> CreateHostMemory() { return std::make_unique<HostMemory>(); }

}  // namespace wavekv
