// The bytes of a channel: what a client and the daemon share. docs/formats.md has the same tables.
//
// The daemon makes the memory, keeps what the header says to itself, and never reads it back. All
// else in it may be written by the client at any moment.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace wavekv::shm {

static_assert(std::endian::native == std::endian::little, "the channel's bytes are little endian");
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

inline constexpr uint64_t kChannelMagic = 0x3141544144564b57;  // "WKVDATA1"
inline constexpr uint32_t kChannelVersion = 1;
inline constexpr uint64_t kArenaAlignment = 64;

constexpr uint64_t ArenaRounded(uint64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

inline constexpr uint32_t kRingEntriesMin = 2;
inline constexpr uint32_t kRingEntriesMax = 1024;
inline constexpr uint64_t kArenaBytesMin = uint64_t{1} << 20;
inline constexpr uint64_t kArenaBytesMax = uint64_t{1} << 32;

// At offset 0. Written whole before anybody else has the memory; only the words change.
struct ChannelHeader {
  uint64_t magic = kChannelMagic;
  uint32_t version = kChannelVersion;
  uint32_t ring_entries = 0;
  uint64_t channel_bytes = 0;
  uint64_t submissions_offset = 0;
  uint64_t completions_offset = 0;
  uint64_t arena_offset = 0;
  uint64_t arena_bytes = 0;
  uint8_t zero_a[72] = {};
  uint32_t tail = 0;  // Client: submissions made, modulo 2^32. A futex.
  uint8_t zero_b[60] = {};
  uint32_t daemon_sleeps = 0;  // Daemon: 1 while it waits on `tail`.
  uint8_t zero_c[60] = {};
};
static_assert(sizeof(ChannelHeader) == 256);
static_assert(offsetof(ChannelHeader, tail) == 128);
static_assert(offsetof(ChannelHeader, daemon_sleeps) == 192);

// Of the submission ring: entry n % ring_entries is the n-th submission.
struct SubmissionEntry {
  uint64_t verb = 0;
  uint64_t request_offset = 0;  // Into the channel, inside the arena.
  uint64_t request_bytes = 0;
  uint64_t reply_offset = 0;
  uint64_t reply_bytes_max = 0;
  uint64_t deadline_ns = 0;  // Of CLOCK_MONOTONIC; later than this nobody wants the answer.
  uint64_t zero[2] = {};
};
static_assert(sizeof(SubmissionEntry) == 64);

// State of a completion. A futex.
enum CompletionState : uint32_t {
  kPending = 0,
  kPendingSleeper = 1,  // As before, and the client sleeps on the word.
  kDone = 2,
};

// Of the completion ring: entry n % ring_entries answers the n-th submission.
struct CompletionEntry {
  uint32_t state = kPending;
  uint32_t code = 0;         // A status code, gRPC's numbers; 0 is OK.
  uint64_t reply_bytes = 0;  // At the submission's reply_offset: a reply, or the error's text.
  uint64_t reply_bytes_needed = 0;  // Above 0: the reply did not fit, this much would do.
  uint8_t zero[40] = {};
};
static_assert(sizeof(CompletionEntry) == 64);

// Where the parts of a channel lie.
struct ChannelGeometry {
  uint32_t ring_entries = 0;
  uint64_t submissions_offset = 0;
  uint64_t completions_offset = 0;
  uint64_t arena_offset = 0;
  uint64_t arena_bytes = 0;
  uint64_t channel_bytes = 0;

  // Whether [offset, offset + bytes) lies in the arena.
  bool InArena(uint64_t offset, uint64_t bytes) const {
    return offset >= arena_offset && bytes <= arena_bytes &&
           offset - arena_offset <= arena_bytes - bytes;
  }
};

// Lays out a channel. InvalidArgument: ring_entries is no power of two in range, or arena_bytes no
// multiple of the page size in range.
absl::StatusOr<ChannelGeometry> LayOutChannel(uint32_t ring_entries, uint64_t arena_bytes);

ChannelHeader HeaderOf(const ChannelGeometry& geometry);

// Reads the header of a channel that another process made, of which `channel_bytes` are mapped.
// FailedPrecondition: of another version, naming both. DataLoss: it contradicts itself.
absl::StatusOr<ChannelGeometry> ReadHeader(const ChannelHeader& header, uint64_t channel_bytes);

// An atomic view of a word of shared memory.
inline std::atomic_ref<uint32_t> AtomicWord(uint32_t& word) {
  return std::atomic_ref<uint32_t>(word);
}

}  // namespace wavekv::shm
