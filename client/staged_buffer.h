// The tenant's wave buffer as this process reads it, in host memory or on a GPU: docs/formats.md,
// "Wave buffer". Internal to the SDK.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "client/gpu/device_reader.h"
#include "client/types.h"
#include "storage/base/mutex.h"
#include "storage/base/shared_memory.h"

namespace wavekv::client {

inline constexpr size_t kBufferTicketBytes = 16;

// Where a buffer's descriptor is to be had. An empty ticket: the daemon has no wave buffer.
struct BufferAccess {
  std::string socket;  // Path of the descriptor socket.
  std::string ticket;
  uint64_t bytes = 0;
  std::string backend = "host";  // Or "cuda".
  std::string device_uuid;
};

// The part of the buffer that belongs to one sequence; inside the mapping.
struct StagedRegion {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// The rows of one step, copied out of a buffer that lies on a GPU.
struct StepCopy {
  std::vector<std::byte> bytes;
  StagedRegion region;  // All of `bytes`.
  QueryResult query;    // As it was, but for where the rows lie.
};

// The daemon writes while we read: what is looked at is read once and checked. Thread-safe.
class StagedBuffer {
 public:
  // Trades the ticket for the descriptor and maps it. Unavailable or DeadlineExceeded: wavebufferd
  // is away. FailedPrecondition: the descriptor could shrink under us, or this process cannot use
  // the GPU. DataLoss: its header is not
  // one of a wave buffer of this version. Else what the other side answered.
  static absl::StatusOr<std::shared_ptr<const StagedBuffer>> Open(
      const BufferAccess& access, std::chrono::milliseconds timeout);

  // The region of the sequence, once all rows up to `step` are in place. NotFound: the sequence has
  // no region here (given back, or the buffer was replaced); DataLoss: the directory is damaged;
  // Unavailable: the GPU failed.
  absl::StatusOr<StagedRegion> FindStep(uint64_t sequence_id, uint64_t step) const;

  // False: on a GPU, where data() is empty and rows are copied first.
  bool in_host_memory() const { return device_ == nullptr; }
  std::span<const std::byte> data() const {
    return {mapping_.data(), static_cast<size_t>(mapping_.bytes())};
  }
  // Of a buffer on a GPU: the rows that `query` staged in `region`. Internal: a row lies outside,
  // or rows are named more than once.
  absl::StatusOr<StepCopy> CopyStep(const StagedRegion& region, const ModelShape& shape,
                                    const QueryResult& query) const;

 private:
  explicit StagedBuffer(Mapping mapping) : mapping_(std::move(mapping)) {}
  explicit StagedBuffer(std::unique_ptr<DeviceReader> device) : device_(std::move(device)) {}
  static absl::StatusOr<std::shared_ptr<StagedBuffer>> OpenOnHost(
      const BufferAccess& access, std::chrono::milliseconds timeout);
  static absl::StatusOr<std::shared_ptr<StagedBuffer>> OpenOnDevice(
      const BufferAccess& access, std::chrono::milliseconds timeout);
  absl::Status ReadHeader();
  // The bytes where they lie, or else their copy in `scratch`.
  absl::StatusOr<const std::byte*> View(uint64_t offset, uint64_t bytes,
                                        std::vector<std::byte>* scratch) const;
  uint64_t bytes() const { return in_host_memory() ? mapping_.bytes() : device_->bytes(); }
  bool Contains(uint64_t offset, uint64_t bytes) const;

  const Mapping mapping_;  // One of the two.
  const std::unique_ptr<DeviceReader> device_;
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
