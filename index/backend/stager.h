// What the engine asks of a wave buffer: bring selected rows into memory that another process
// reads. Implemented in gpu/; injected by daemon/main.cc; absent on a machine without one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "index/backend/resident.h"
#include "index/segment.h"
#include "storage/base/ids.h"
#include "storage/base/model_shape.h"

namespace wavekv {

// Rows of one KV head that a step wants in the wave buffer.
struct StageRun {
  RowRun rows;  // Stays valid while `owner` lives.
  std::shared_ptr<const void> owner;
  // Identity for the block cache; cacheable only when segment_uid != 0. A cluster's rows are
  // ceil(row_count / 8) blocks numbered from first_block.
  uint64_t segment_uid = 0;
  uint32_t first_block = 0;
};

struct StageHead {
  uint32_t kv_head = 0;
  std::vector<StageRun> steady;     // Always staged, or the step fails.
  std::vector<StageRun> retrieved;  // Best first; a tail that does not fit is left out.
};

// Where rows lie in the buffer: contiguous [row_count, dim] of the sequence's dtype.
struct StagedSpan {
  uint64_t key_offset = 0;
  uint64_t value_offset = 0;
  uint32_t row_count = 0;
  bool cache_hit = false;
};

struct StagedHead {
  uint32_t kv_head = 0;
  std::vector<StagedSpan> steady;
  std::vector<StagedSpan> retrieved;  // One per block, clusters in the order asked for.
  uint32_t retrieved_runs = 0;        // How many of the runs fitted, from the front.
};

struct StagedStep {
  uint64_t step = 0;  // Acknowledged by a later call's completed_step.
  std::vector<StagedHead> heads;
  uint64_t hit_blocks = 0;
  uint64_t miss_blocks = 0;
};

struct StageCounters {
  uint64_t hit_blocks = 0;
  uint64_t miss_blocks = 0;
};

struct WaveBufferStatus {
  std::string device_uuid;
  std::string backend;
  bool connected = false;
  uint64_t bytes_max = 0;
  uint64_t bytes_used = 0;
  uint64_t hit_blocks = 0;
  uint64_t miss_blocks = 0;
  uint64_t admitted_blocks = 0;
  bool pinned = false;
};

// How a client of `tenant` reaches its buffer.
struct WaveBufferAccess {
  std::string device_uuid;
  std::string backend;
  std::string socket;
  std::string ticket;  // 16 bytes
  uint64_t buffer_bytes = 0;
};

// Thread-safe.
class Stager {
 public:
  virtual ~Stager() = default;

  // The tenant's buffer, allocated when first asked for. Unavailable: wavebufferd is away.
  virtual absl::StatusOr<WaveBufferAccess> Access(const TenantId& tenant, int64_t client_uid) = 0;

  // Carves the sequence's region; its block cache is a share of the payload of `max_tokens` tokens.
  // ResourceExhausted names the buffer's size and the flag.
  virtual absl::Status AttachSequence(const TenantId& tenant, SequenceId sequence,
                                      const ModelShape& shape, uint64_t max_tokens) = 0;
  // Gives the region back (wiped before reuse). Unknown sequences are ignored.
  virtual void DetachSequence(SequenceId sequence) = 0;

  // Stages one layer's step. Runs with a cached block are not copied. Rows staged by steps after
  // `completed_step` stay untouched. Misses are admitted to the block cache afterwards.
  // FailedPrecondition: not attached. InvalidArgument: `completed_step` was never staged.
  // ResourceExhausted: the steady rows alone do not fit. Unavailable: wavebufferd is away.
  virtual absl::StatusOr<StagedStep> Stage(SequenceId sequence, uint32_t layer,
                                           uint64_t completed_step,
                                           std::span<const StageHead> heads) = 0;

  // Looks the retrieved runs up, counts hits and misses and admits the misses afterwards; nothing
  // is staged. For a step whose attention the daemon computes itself.
  virtual absl::StatusOr<StageCounters> Touch(SequenceId sequence, uint32_t layer,
                                              std::span<const StageHead> heads) = 0;

  // Carves a resident region for the sequence, whose client then attends on the device itself. The
  // tenant's buffer stays while it lives; once that is lost, Poll says so: Unavailable.
  // FailedPrecondition: the buffer is in host memory, where steps are Attend's.
  // InvalidArgument: a shape or an option that no step on a GPU has. ResourceExhausted: no room.
  // Unavailable: wavebufferd is away.
  virtual absl::StatusOr<std::unique_ptr<ResidentSequence>> AttachResident(
      const TenantId& tenant, SequenceId sequence, const ModelShape& shape, uint64_t max_tokens,
      const ResidentOptions& options) = 0;

  // Gives back what closed resident sequences held and no kernel can touch any more; returns how
  // many still hold something.
  virtual size_t Sweep() = 0;

  virtual std::vector<WaveBufferStatus> Status() const = 0;
};

}  // namespace wavekv
