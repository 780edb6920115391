// The tenant's wave buffer, mapped read-only into this process: docs/formats.md, "Wave buffer".
// Internal to the SDK.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "storage/base/mutex.h"
#include "storage/base/shared_memory.h"

namespace wavekv::client {

inline constexpr size_t kBufferTicketBytes = 16;

// Where a buffer's descriptor is to be had. An empty ticket: the daemon has no wave buffer.
struct BufferAccess {
  std::string socket;  // Path of the descriptor socket.
  std::string ticket;
  uint64_t bytes = 0;
};

// The part of the buffer that belongs to one sequence; inside the mapping.
struct StagedRegion {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// The daemon writes while we read: what is looked at is read once and checked. Thread-safe.
class StagedBuffer {
 public:
  // Trades the ticket for the descriptor and maps it. Unavailable or DeadlineExceeded: wavebufferd
  // is away. FailedPrecondition: the descriptor could shrink under us. DataLoss: its header is not
  // one of a wave buffer of this version. Else what the other side answered.
  static absl::StatusOr<std::shared_ptr<const StagedBuffer>> Open(
      const BufferAccess& access, std::chrono::milliseconds timeout);

  // The region of the sequence, once all rows up to `step` are in place. NotFound: the sequence has
  // no region here (given back, or the buffer was replaced); DataLoss: the directory is damaged.
  absl::StatusOr<StagedRegion> FindStep(uint64_t sequence_id, uint64_t step) const;

  std::span<const std::byte> data() const {
    return {mapping_.data(), static_cast<size_t>(mapping_.bytes())};
  }

 private:
  explicit StagedBuffer(Mapping mapping) : mapping_(std::move(mapping)) {}
  absl::Status ReadHeader();
  uint64_t Load64(uint64_t offset) const;
  uint32_t Load32(uint64_t offset) const;
  bool Contains(uint64_t offset, uint64_t bytes) const;

  const Mapping mapping_;
  uint64_t directory_offset_ = 0;
  uint32_t directory_entries_ = 0;
};

// The mapping of the ticket asked for last. Thread-safe; no lock is held while a buffer is opened.
class StagedBufferCache {
 public:
  // FailedPrecondition when `access` names no buffer.
  absl::StatusOr<std::shared_ptr<const StagedBuffer>> Get(const BufferAccess& access,
                                                          std::chrono::milliseconds timeout);

 private:
  Mutex mutex_;
  std::string ticket_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const StagedBuffer> buffer_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace wavekv::client
