#include "storage/base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

absl::Status AddSeals(int fd, int seals) {
  if (::fcntl(fd, F_ADD_SEALS, seals) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot seal descriptor ", fd));
}

}  // namespace

absl::StatusOr<UniqueFd> CreateMemfd(const std::string& name, uint64_t bytes) {
  if (bytes == 0 || bytes > static_cast<uint64_t>(std::numeric_limits<off_t>::max())) {
    return absl::InvalidArgumentError(absl::StrCat("memfd '", name, "': size is ", bytes,
                                                   " bytes, expected 1 to ",
                                                   std::numeric_limits<off_t>::max()));
  }
  UniqueFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot create memfd '", name, "'"));
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return absl::ErrnoToStatus(errno,
                               absl::StrCat("cannot size memfd '", name, "' to ", bytes, " bytes"));
  }
  return fd;
}

absl::Status SealSize(int fd) { return AddSeals(fd, F_SEAL_SHRINK | F_SEAL_GROW); }

absl::Status SealForReaders(int fd) {
  return AddSeals(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
}

absl::Status CheckSizeSealed(int fd) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals >= 0 && (seals & F_SEAL_SHRINK) != 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "descriptor ", fd, " can shrink under its readers; expected a memfd sealed with ",
      "F_SEAL_SHRINK, found ", seals < 0 ? "no memfd" : "no such seal"));
}

absl::StatusOr<uint64_t> FileBytes(int fd) {
  struct stat info;
  if (::fstat(fd, &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot stat descriptor ", fd));
  }
  return static_cast<uint64_t>(info.st_size);
}

void PopulatePages(std::byte* begin, size_t bytes) {
  constexpr uintptr_t kPageBytes = 4096;
  constexpr int kMadvPopulateWrite = 23;  // MADV_POPULATE_WRITE, Linux 5.14.
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) & ~(kPageBytes - 1);
  const uintptr_t end = reinterpret_cast<uintptr_t>(begin) + bytes;
  // A refusal (an old kernel, pages of another size) costs time only.
  (void)::madvise(reinterpret_cast<void*>(first), end - first, kMadvPopulateWrite);
}

void DiscardPages(std::byte* begin, size_t bytes) {
  static const auto page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t address = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (address + page_bytes - 1) & ~(page_bytes - 1);
  const uintptr_t end = (address + bytes) & ~(page_bytes - 1);
  if (first >= end) return;
  (void)::madvise(reinterpret_cast<void*>(first), end - first, MADV_DONTNEED);
}

absl::StatusOr<Mapping> Mapping::Private(uint64_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("cannot map 0 bytes");
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the kernel refuses ", bytes, " bytes of address space (errno ", errno,
                     "); where vm.overcommit_memory is 2, raise vm.overcommit_ratio"));
  }
  return Mapping(static_cast<std::byte*>(address), bytes, kReadWrite);
}

absl::StatusOr<Mapping> Mapping::Map(int fd, uint64_t bytes, Access access) {
  WAVEKV_ASSIGN_OR_RETURN(const uint64_t file_bytes, FileBytes(fd));
  if (bytes == 0 || bytes > file_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("cannot map ", bytes, " bytes of descriptor ",
                                                   fd, ", which has ", file_bytes));
  }
  const int protection = access == kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* address = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) {
    return absl::ErrnoToStatus(
        errno, absl::StrCat("cannot map ", bytes, " bytes of descriptor ", fd,
                            access == kReadWrite ? " for writing" : " for reading"));
  }
  return Mapping(static_cast<std::byte*>(address), bytes, access);
}

Mapping::~Mapping() {
  if (data_ != nullptr) {
    WAVEKV_CHECK(::munmap(data_, bytes_) == 0, "munmap of a mapping of ours failed");
  }
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      access_(other.access_) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(access_, other.access_);
  return *this;
}

}  // namespace wavekv
