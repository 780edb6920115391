// One sequence's region of a wave buffer: its block cache, its staging area, its steps.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/buffer_layout.h"
#include "gpu/buffer_memory.h"
#include "gpu/region_layout.h"
#include "gpu/staging_ring.h"
#include "gpu/tenant_buffer.h"
#include "index/backend/stager.h"
#include "storage/base/ids.h"
#include "storage/base/mutex.h"
#include "storage/block_cache_policy.h"

namespace wavekv {

// A block that a step asked for and the cache did not have.
struct MissedBlock {
  BlockKey key;
  RowRun rows;                        // At most kBlockTokens.
  std::shared_ptr<const void> owner;  // Keeps the rows.
};

// Thread-safe; steps of one sequence are staged one after another.
class SequenceRegion {
 public:
  // Carves a region of `buffer` and writes its header. Steps are numbered by `last_step`, which
  // goes on when a sequence gets another region. ResourceExhausted: no room in the buffer. Else
  // the memory's.
  static absl::StatusOr<std::shared_ptr<SequenceRegion>> Create(
      std::shared_ptr<TenantBuffer> buffer, SequenceId sequence, uint32_t kv_head_count,
      const RegionLayout& layout, std::shared_ptr<std::atomic<uint64_t>> last_step);
  ~SequenceRegion();
  SequenceRegion(const SequenceRegion&) = delete;
  SequenceRegion& operator=(const SequenceRegion&) = delete;

  // As Stager::Stage, or the memory's failure: the number of such a step is used up. Appends the
  // misses that can be admitted afterwards.
  absl::StatusOr<StagedStep> Stage(uint32_t layer, uint64_t completed_step,
                                   std::span<const StageHead> heads,
                                   std::vector<MissedBlock>* misses);
  // As Stager::Touch.
  StageCounters Touch(std::span<const StageHead> heads, std::vector<MissedBlock>* misses);

  // Copies blocks into slots that no step reads and publishes them; returns how many. Stops early
  // when the region is closed or the memory fails.
  uint64_t Admit(std::span<const MissedBlock> blocks);

  // Waits for a running admission, wipes the region and gives it back; one that could not be wiped
  // is never used again. Stage and Touch fail or do nothing from now on. Idempotent.
  void Close();

 private:
  struct StepPlan;
  SequenceRegion(std::shared_ptr<TenantBuffer> buffer, const RegionPlace& place,
                 SequenceId sequence, uint32_t kv_head_count, const RegionLayout& layout,
                 std::shared_ptr<std::atomic<uint64_t>> last_step);

  absl::Status WriteHeader();
  absl::Status CheckCompleted(uint64_t completed_step) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status PlanSteady(uint32_t layer, std::span<const StageHead> heads, StepPlan* plan)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void PlanRetrieved(std::span<const StageHead> heads, StepPlan* plan)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool PlanRun(const StageRun& run, StepPlan* plan, StagedHead* head)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<uint32_t> FindBlock(const StageRun& run, uint32_t block_idx, uint64_t step)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteMiss(const StageRun& run, uint32_t block_idx, std::vector<MissedBlock>* misses) const;
  StagedSpan PlanCopy(const RowRun& rows, StepPlan* plan) const;
  StagedSpan SlotSpan(uint32_t slot, uint32_t row_count) const;
  // Rows of block `block_idx` of `run`, counted from its first row.
  RowRun BlockRows(const RowRun& run, uint32_t block_idx) const;
  void AppendCopies(const RowRun& rows, const StagedSpan& span,
                    std::vector<ByteCopy>* copies) const;
  // Copies batch[i] to slots[i].
  absl::Status FillSlots(std::span<const MissedBlock* const> batch,
                         std::span<const uint32_t> slots) const;
  absl::Status Wipe() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::shared_ptr<TenantBuffer> buffer_;
  const RegionPlace place_;
  const SequenceId sequence_;
  const uint32_t kv_head_count_;
  const RegionLayout layout_;
  const std::shared_ptr<std::atomic<uint64_t>> last_step_;

  Mutex mutex_;
  CondVar admitted_;
  const std::unique_ptr<BlockCachePolicy> cache_ ABSL_PT_GUARDED_BY(mutex_);
  uint32_t slots_written_ ABSL_GUARDED_BY(mutex_) = 0;  // No slot from here on was ever written.
  StagingRing ring_ ABSL_GUARDED_BY(mutex_);
  uint64_t completed_step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t admitting_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace wavekv
