// Anonymous memory: memfds, which can be shared, with their mappings and seals, and private memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

// A sparse, zeroed memfd of exactly `bytes` (> 0), close-on-exec, that can still be sealed.
// `name` is what /proc/<pid>/maps shows. Pages are taken from the kernel when first touched.
absl::StatusOr<UniqueFd> CreateMemfd(const std::string& name, uint64_t bytes);

// Forbids every change of size. The memory stays writable for whoever holds the descriptor.
absl::Status SealSize(int fd);

// Forbids every change of size, every new writable mapping, write(2) and further seals (SHRINK,
// GROW, FUTURE_WRITE, SEAL). Writable mappings made before go on working: map first, then seal.
absl::Status SealForReaders(int fd);

// FailedPrecondition unless `fd` can never shrink. Demand it of every descriptor that came from
// another process: touching a mapping behind the end of a shrunken file is a SIGBUS.
absl::Status CheckSizeSealed(int fd);

// Size of the file behind `fd`.
absl::StatusOr<uint64_t> FileBytes(int fd);

// Asks the kernel for the pages of [begin, begin + bytes), to be written soon, in one call instead
// of a fault for each. Whether it has them to give shows when they are touched.
void PopulatePages(std::byte* begin, size_t bytes);

// Gives the whole pages in [begin, begin + bytes), which lies in private memory, back to the
// kernel; their contents are lost. Pages that are locked into memory stay.
void DiscardPages(std::byte* begin, size_t bytes);

// A shared mapping of the first `bytes` of a descriptor. Does not own the descriptor, which may
// be closed while the mapping lives; or private memory. Movable.
class Mapping {
 public:
  enum Access { kReadOnly, kReadWrite };

  // InvalidArgument when the file has fewer than `bytes` or `bytes` is 0; PermissionDenied when a
  // seal forbids the access.
  static absl::StatusOr<Mapping> Map(int fd, uint64_t bytes, Access access);

  // Zeroed memory of this process alone, `bytes` of address space. Pages are taken from the kernel
  // when first touched. InvalidArgument for 0 bytes; ResourceExhausted when the kernel, which may
  // be told to promise no more than it has, refuses.
  static absl::StatusOr<Mapping> Private(uint64_t bytes);

  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // nullptr when nothing is mapped. Writing through a read-only mapping is a SIGSEGV.
  std::byte* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  Access access() const { return access_; }

 private:
  Mapping(std::byte* data, uint64_t bytes, Access access)
      : data_(data), bytes_(bytes), access_(access) {}

  std::byte* data_ = nullptr;
  uint64_t bytes_ = 0;
  Access access_ = kReadOnly;
};

}  // namespace wavekv
