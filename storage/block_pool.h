// The block pool: K and V in CPU memory, in memfds that only this process can write.
//
// Each sequence gets an arena, a memfd of its own that belongs to one tenant
// (docs/decisions/002-block-pool.md). Runs are carved from an arena; an arena lives until its last
// run and its last owner are gone, and closing it gives the memory back to the kernel, which a
// sealed memfd allows in no other way. What no peer will read, and what comes and goes, lies in
// private runs instead, whose pages go back one by one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/base/ids.h"
#include "storage/base/mutex.h"

namespace wavekv {

class Arena;

// A contiguous piece of an arena, 64-byte aligned, given back when destroyed. Keeps its arena
// alive. Immutable sharing is by shared_ptr<const Run>. Thread-safe to destroy anywhere.
class Run {
 public:
  enum class Place : uint8_t { kFile, kPrivate };

  Run(std::shared_ptr<Arena> arena, Place place, uint64_t offset, uint64_t bytes,
      uint64_t payload_bytes);
  ~Run();
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // The contents of [offset, offset + bytes) are not needed any more: of a private run the whole
  // pages in it go back to the kernel, until they are written again.
  void Discard(uint64_t offset, uint64_t bytes);

  std::byte* data() const;
  Place place() const { return place_; }
  uint64_t offset() const { return offset_; }                // In its place.
  uint64_t bytes() const { return bytes_; }                  // Occupied, alignment included.
  uint64_t payload_bytes() const { return payload_bytes_; }  // Asked for.
  const Arena& arena() const { return *arena_; }

 private:
  const std::shared_ptr<Arena> arena_;
  const Place place_;
  const uint64_t offset_;
  const uint64_t bytes_;
  const uint64_t payload_bytes_;
};

struct PoolUsage {
  uint64_t bytes_max = 0;
  uint64_t reserved_bytes = 0;   // Promised to arenas and index charges.
  uint64_t allocated_bytes = 0;  // In live runs.
  uint64_t payload_bytes = 0;    // Asked for by live runs.
  uint64_t arena_count = 0;
};

struct TenantUsage {
  TenantId tenant;
  uint64_t bytes_max = 0;
  PoolUsage usage;
};

struct BlockPoolOptions {
  uint64_t bytes_max = 0;         // Hard limit over all tenants, index memory included.
  uint64_t tenant_bytes_max = 0;  // Hard limit for each tenant; 0: bytes_max.
};

// Thread-safe.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  // The caller has compared options.bytes_max with the machine (CheckPoolFits).
  static std::shared_ptr<BlockPool> Create(const BlockPoolOptions& options);
  ~BlockPool();

  // Reserves `reserved_bytes` for `tenant` (of which the arena's file takes `arena_bytes`; the
  // rest is for the index in process memory) and creates the arena.
  // ResourceExhausted: over the daemon's or the tenant's limit; the text says what was asked, what
  // is free, who holds how much and which flag to change. `label` names the holder. Sizes are
  // charged in whole pages. InvalidArgument: arena_bytes is 0 or more than reserved_bytes.
  absl::StatusOr<std::shared_ptr<Arena>> CreateArena(const TenantId& tenant, uint64_t arena_bytes,
                                                     uint64_t reserved_bytes, std::string label);

  // The arena whose file `address` lies in; the caller holds a run of it. Null: in none.
  std::shared_ptr<const Arena> ArenaOf(const std::byte* address) const;

  PoolUsage Usage() const;
  std::vector<TenantUsage> TenantUsages() const;

 private:
  friend class Arena;
  struct Impl;
  explicit BlockPool(const BlockPoolOptions& options);
  const std::unique_ptr<Impl> impl_;
};

// One memfd, mapped writable here and sealed (SHRINK, GROW, FUTURE_WRITE, SEAL), and as much
// address space of this process alone. The pages of both together never exceed arena_bytes.
// Thread-safe.
class Arena : public std::enable_shared_from_this<Arena> {
 public:
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A run of at least `bytes`, best fit, lowest offset first. Contents are unspecified.
  // ResourceExhausted when no free piece is large enough; names the arena's size and free bytes.
  absl::StatusOr<std::shared_ptr<Run>> Allocate(uint64_t bytes);
  // The same in private memory, in whole pages; where only the file has pages left that were used
  // before, one of those.
  absl::StatusOr<std::shared_ptr<Run>> AllocatePrivate(uint64_t bytes);

  uint64_t arena_bytes() const;
  uint64_t reserved_bytes() const;
  const TenantId& tenant() const;
  PoolUsage Usage() const;
  // The memfd, owned by the arena. A peer that maps it gets read-only memory.
  int fd() const;
  // Where `address` lies in the memfd; nothing when it does not.
  std::optional<uint64_t> FileOffset(const std::byte* address) const;

 private:
  friend class BlockPool;
  friend class Run;
  struct Impl;
  explicit Arena(std::unique_ptr<Impl> impl);
  static absl::Status MapMemory(Impl* impl);
  // A place for `bytes`, which are counted as `payload_bytes`; nullptr when there is none.
  std::shared_ptr<Run> AllocateAt(Run::Place place, uint64_t bytes, uint64_t payload_bytes);
  absl::Status NoRoom(uint64_t bytes) const;
  void Free(const Run& run);
  std::byte* base(Run::Place place) const;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace wavekv
