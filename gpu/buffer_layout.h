// The wave buffer as it lies in shared memory: docs/formats.md describes it byte by byte.
//
// One process (wavekvd) writes; readers map it read-only. Fields that change while readers look are
// atomic; all others are written before the word that announces them is stored with release order.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace wavekv {

static_assert(std::atomic<uint64_t>::is_always_lock_free);

inline constexpr uint64_t kBufferMagic = 0x3146554245564157;  // "WAVEBUF1", little endian
inline constexpr uint64_t kRegionMagic = 0x3147455245564157;  // "WAVEREG1", little endian
inline constexpr uint32_t kBufferLayoutVersion = 1;
inline constexpr uint64_t kBufferPageBytes = 4096;  // Unit of regions and of their parts.
inline constexpr uint64_t kRowAlignBytes = 64;      // Of every span of rows.

inline constexpr uint64_t kBufferLive = 1;
inline constexpr uint64_t kBufferClosed = 2;  // Nothing is staged here any more.

// At offset 0 of the buffer.
struct BufferHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t directory_entries;
  uint64_t buffer_bytes;
  uint64_t directory_offset;
  std::atomic<uint64_t> state;  // kBufferLive, kBufferClosed; 0 before the header is complete.
};
static_assert(sizeof(BufferHeader) == 40 && offsetof(BufferHeader, state) == 32);

// The directory: one entry per region, at directory_offset.
struct DirectoryEntry {
  std::atomic<uint64_t> sequence_id;  // 0: free. Stored last, cleared first.
  uint64_t region_offset;             // From the start of the buffer, like every offset.
  uint64_t region_bytes;
  uint64_t reserved;
};
static_assert(sizeof(DirectoryEntry) == 32);

// At region_offset, on a page of its own; block cache and staging area follow.
struct RegionHeader {
  uint64_t magic;
  std::atomic<uint64_t> sequence_id;  // 0: the region was given back; its rows are wiped.
  uint64_t region_bytes;
  uint64_t cache_offset;
  uint64_t staging_offset;
  uint64_t staging_bytes;
  uint32_t slot_bytes;  // One block: 8 key rows, then 8 value rows, each part 64-byte aligned.
  uint32_t slot_count;
  uint32_t key_row_bytes;
  uint32_t value_row_bytes;
  alignas(64) std::atomic<uint64_t> step;  // Every row of steps up to this one is in place.
};
static_assert(sizeof(RegionHeader) == 128 && offsetof(RegionHeader, slot_bytes) == 48 &&
              offsetof(RegionHeader, step) == 64);

constexpr uint64_t AlignUp(uint64_t bytes, uint64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

}  // namespace wavekv
