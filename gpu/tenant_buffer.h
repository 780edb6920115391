// One tenant's wave buffer, which we write: its header, its directory and its regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/buffer_layout.h"
#include "gpu/buffer_memory.h"
#include "storage/base/ids.h"
#include "storage/base/mutex.h"
#include "storage/best_fit_allocator.h"

namespace wavekv {

// Where a region lies, from the start of the buffer.
struct RegionPlace {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint32_t directory_idx = 0;
};

// Thread-safe. A status that is not OK is the memory's.
class TenantBuffer {
 public:
  // Takes zeroed memory and writes header and directory into it.
  // InvalidArgument: too small for a directory of `regions_max` and one page more.
  static absl::StatusOr<std::shared_ptr<TenantBuffer>> Create(std::unique_ptr<BufferMemory> memory,
                                                              uint32_t regions_max);
  // What Create needs at least.
  static uint64_t BytesMin(uint32_t regions_max);
  TenantBuffer(const TenantBuffer&) = delete;
  TenantBuffer& operator=(const TenantBuffer&) = delete;

  // A zeroed piece of at least `bytes`, a multiple of pages. ResourceExhausted: says what is free.
  absl::StatusOr<RegionPlace> Carve(uint64_t bytes);
  // Enters a region in the directory, where readers find it, once its header is written.
  absl::Status Announce(const RegionPlace& place, SequenceId sequence);
  // Takes it out again, before the region is wiped.
  absl::Status Withdraw(const RegionPlace& place);
  // Gives a wiped piece back.
  void Return(const RegionPlace& place);
  // Gives a piece back once `wipe` says true, that it was wiped. It is asked now, whenever a piece
  // is carved, and by Sweep, from any thread, one call at a time; it outlives nobody: what it needs
  // of the buffer is there. Its failure means that the piece is never used again.
  void ReturnLater(const RegionPlace& place, std::function<absl::StatusOr<bool>()> wipe);
  // Asks for all pieces that wait; how many still do.
  size_t Sweep();

  // Tells readers that nothing is staged here any more.
  absl::Status Close();

  BufferMemory& memory() { return *memory_; }
  uint64_t bytes() const { return memory_->bytes(); }
  uint64_t free_bytes() const;

 private:
  TenantBuffer(std::unique_ptr<BufferMemory> memory, uint32_t regions_max, uint64_t regions_offset);
  absl::Status WriteHeader(uint32_t regions_max);

  const std::unique_ptr<BufferMemory> memory_;
  mutable Mutex mutex_;
  const uint64_t regions_offset_;                       // Header and directory lie before it.
  BestFitAllocator allocator_ ABSL_GUARDED_BY(mutex_);  // Offsets from regions_offset_.
  std::vector<uint32_t> free_entries_ ABSL_GUARDED_BY(mutex_);
  struct LateReturn {
    RegionPlace place;
    std::function<absl::StatusOr<bool>()> wipe;
  };
  Mutex sweep_mutex_;  // Taken before mutex_, held while wipes are asked.
  std::vector<LateReturn> late_ ABSL_GUARDED_BY(sweep_mutex_);
};

}  // namespace wavekv
