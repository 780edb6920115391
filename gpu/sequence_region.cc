#include "gpu/sequence_region.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Blocks copied between two looks at the region's lock.
constexpr size_t kAdmitBatch = 32;

uint32_t BlockCount(const RowRun& rows) {
  return (rows.row_count + kBlockTokens - 1) / kBlockTokens;
}

void CheckHeads(std::span<const StageHead> heads, uint32_t kv_head_count) {
  for (const StageHead& head : heads) {
    WAVEKV_CHECK(head.kv_head < kv_head_count, "kv_head is one of the sequence's");
  }
}

}  // namespace

// One step in the making: what goes where, before anything is copied.
struct SequenceRegion::StepPlan {
  struct Copy {
    RowRun rows;
    StagedSpan target;
  };

  uint64_t begin = 0;           // Of the free piece, from the start of the buffer.
  uint64_t capacity_bytes = 0;  // Of it.
  uint64_t used_bytes = 0;
  std::vector<Copy> copies;
  std::vector<MissedBlock>* misses = nullptr;
  StagedStep step;

  uint64_t left_bytes() const { return capacity_bytes - used_bytes; }
};

absl::StatusOr<std::shared_ptr<SequenceRegion>> SequenceRegion::Create(
    std::shared_ptr<TenantBuffer> buffer, SequenceId sequence, uint32_t kv_head_count,
    const RegionLayout& layout, std::shared_ptr<std::atomic<uint64_t>> last_step) {
  WAVEKV_ASSIGN_OR_RETURN(const RegionPlace place, buffer->Carve(layout.region_bytes));
  return std::shared_ptr<SequenceRegion>(new SequenceRegion(
      std::move(buffer), place, sequence, kv_head_count, layout, std::move(last_step)));
}

SequenceRegion::SequenceRegion(std::shared_ptr<TenantBuffer> buffer, const RegionPlace& place,
                               SequenceId sequence, uint32_t kv_head_count,
                               const RegionLayout& layout,
                               std::shared_ptr<std::atomic<uint64_t>> last_step)
    : buffer_(std::move(buffer)),
      place_(place),
      sequence_(sequence),
      kv_head_count_(kv_head_count),
      layout_(layout),
      last_step_(std::move(last_step)),
      cache_(MakeLrfuBlockCachePolicy(layout.slot_count)),
      ring_(layout.staging_bytes) {
  auto* header = new (this->header()) RegionHeader{};
  header->magic = kRegionMagic;
  header->region_bytes = place.bytes;
  header->cache_offset = place.offset + layout.cache_offset;
  header->staging_offset = place.offset + layout.staging_offset;
  header->staging_bytes = layout.staging_bytes;
  header->slot_bytes = layout.slot_bytes;
  header->slot_count = layout.slot_count;
  header->key_row_bytes = layout.key_row_bytes;
  header->value_row_bytes = layout.value_row_bytes;
  header->sequence_id.store(sequence.value(), std::memory_order_release);
  buffer_->Announce(place_, sequence);
}

SequenceRegion::~SequenceRegion() { Close(); }

absl::Status SequenceRegion::CheckCompleted(uint64_t completed_step) {
  const uint64_t last_step = last_step_->load(std::memory_order_relaxed);
  if (completed_step > last_step) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence ", sequence_.value(), ": completed_step is ", completed_step,
                     ", expected at most ", last_step, ", the last step that was staged"));
  }
  // A late request may carry an older one.
  completed_step_ = std::max(completed_step_, completed_step);
  ring_.Release(completed_step_);
  return absl::OkStatus();
}

RowRun SequenceRegion::BlockRows(const RowRun& run, uint32_t block_idx) const {
  const uint32_t first_row = block_idx * kBlockTokens;
  return {run.keys + uint64_t{first_row} * layout_.key_row_bytes,
          run.values + uint64_t{first_row} * layout_.value_row_bytes,
          std::min(kBlockTokens, run.row_count - first_row)};
}

StagedSpan SequenceRegion::SlotSpan(uint32_t slot, uint32_t row_count) const {
  const uint64_t offset =
      place_.offset + layout_.cache_offset + uint64_t{slot} * layout_.slot_bytes;
  return {offset, offset + layout_.value_part_offset, row_count, /*cache_hit=*/true};
}

StagedSpan SequenceRegion::PlanCopy(const RowRun& rows, StepPlan* plan) const {
  StagedSpan span;
  span.key_offset = plan->begin + plan->used_bytes;
  span.value_offset =
      span.key_offset + AlignUp(uint64_t{rows.row_count} * layout_.key_row_bytes, kRowAlignBytes);
  span.row_count = rows.row_count;
  plan->used_bytes += SpanBytes(layout_, rows.row_count);
  WAVEKV_CHECK(plan->used_bytes <= plan->capacity_bytes, "a step stays in its piece");
  plan->copies.push_back({rows, span});
  return span;
}

void SequenceRegion::CopyRows(const RowRun& rows, const StagedSpan& span) const {
  if (rows.row_count == 0) return;
  std::memcpy(buffer_->data() + span.key_offset, rows.keys,
              uint64_t{rows.row_count} * layout_.key_row_bytes);
  std::memcpy(buffer_->data() + span.value_offset, rows.values,
              uint64_t{rows.row_count} * layout_.value_row_bytes);
}

absl::Status SequenceRegion::PlanSteady(uint32_t layer, std::span<const StageHead> heads,
                                        StepPlan* plan) {
  uint64_t needed_bytes = 0;
  for (const StageHead& head : heads) {
    for (const StageRun& run : head.steady) needed_bytes += SpanBytes(layout_, run.rows.row_count);
  }
  if (needed_bytes > plan->capacity_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "sequence ", sequence_.value(), " layer ", layer, ": the steady rows need ", needed_bytes,
        " bytes of the staging area, ", plan->capacity_bytes, " of ", ring_.bytes(),
        " are free in one piece and ", ring_.bytes_used(), " hold steps after completed_step ",
        completed_step_, "; complete steps sooner or raise --wave_buffer_staging_tokens"));
  }
  for (const StageHead& head : heads) {
    StagedHead& staged = plan->step.heads.emplace_back();
    staged.kv_head = head.kv_head;
    for (const StageRun& run : head.steady) staged.steady.push_back(PlanCopy(run.rows, plan));
  }
  return absl::OkStatus();
}

std::optional<uint32_t> SequenceRegion::FindBlock(const StageRun& run, uint32_t block_idx,
                                                  uint64_t step) {
  if (run.segment_uid == 0) return std::nullopt;
  return cache_->Lookup({run.segment_uid, run.first_block + block_idx}, step);
}

bool SequenceRegion::PlanRun(const StageRun& run, StepPlan* plan, StagedHead* head) {
  std::vector<std::optional<uint32_t>> slots(BlockCount(run.rows));
  uint64_t needed_bytes = 0;
  for (uint32_t block = 0; block < slots.size(); ++block) {
    slots[block] = FindBlock(run, block, plan->step.step);
    if (slots[block].has_value()) continue;
    needed_bytes += SpanBytes(layout_, BlockRows(run.rows, block).row_count);
  }
  if (needed_bytes > plan->left_bytes()) return false;
  for (uint32_t block = 0; block < slots.size(); ++block) {
    const RowRun rows = BlockRows(run.rows, block);
    if (slots[block].has_value()) {
      head->retrieved.push_back(SlotSpan(*slots[block], rows.row_count));
      ++plan->step.hit_blocks;
      continue;
    }
    head->retrieved.push_back(PlanCopy(rows, plan));
    ++plan->step.miss_blocks;
    NoteMiss(run, block, plan->misses);
  }
  ++head->retrieved_runs;
  return true;
}

void SequenceRegion::NoteMiss(const StageRun& run, uint32_t block_idx,
                              std::vector<MissedBlock>* misses) const {
  if (run.segment_uid == 0) return;
  misses->push_back(
      {{run.segment_uid, run.first_block + block_idx}, BlockRows(run.rows, block_idx), run.owner});
}

// Best runs of all heads first, so that no head takes the room of another's better runs.
void SequenceRegion::PlanRetrieved(std::span<const StageHead> heads, StepPlan* plan) {
  std::vector<bool> full(heads.size(), false);
  size_t run_count_max = 0;
  for (const StageHead& head : heads)
    run_count_max = std::max(run_count_max, head.retrieved.size());
  for (size_t rank = 0; rank < run_count_max; ++rank) {
    for (size_t i = 0; i < heads.size(); ++i) {
      if (full[i] || rank >= heads[i].retrieved.size()) continue;
      full[i] = !PlanRun(heads[i].retrieved[rank], plan, &plan->step.heads[i]);
    }
  }
}

absl::StatusOr<StagedStep> SequenceRegion::Stage(uint32_t layer, uint64_t completed_step,
                                                 std::span<const StageHead> heads,
                                                 std::vector<MissedBlock>* misses) {
  CheckHeads(heads, kv_head_count_);
  MutexLock lock(&mutex_);
  if (closed_) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", sequence_.value(), " was detached from the wave buffer"));
  }
  WAVEKV_RETURN_IF_ERROR(CheckCompleted(completed_step));
  StepPlan plan;
  const StagingRing::Piece piece = ring_.Largest();
  plan.begin = place_.offset + layout_.staging_offset + piece.begin;
  plan.capacity_bytes = piece.bytes;
  plan.misses = misses;
  plan.step.step = last_step_->load(std::memory_order_relaxed) + 1;
  WAVEKV_RETURN_IF_ERROR(PlanSteady(layer, heads, &plan));
  PlanRetrieved(heads, &plan);

  const uint64_t taken = ring_.Take(plan.step.step, plan.used_bytes);
  WAVEKV_CHECK(taken == piece.begin, "the planned piece is the one that is taken");
  for (const StepPlan::Copy& copy : plan.copies) CopyRows(copy.rows, copy.target);
  last_step_->store(plan.step.step, std::memory_order_relaxed);
  // Readers that see this step see its rows.
  header()->step.store(plan.step.step, std::memory_order_release);
  return std::move(plan.step);
}

StageCounters SequenceRegion::Touch(std::span<const StageHead> heads,
                                    std::vector<MissedBlock>* misses) {
  CheckHeads(heads, kv_head_count_);
  StageCounters counters;
  MutexLock lock(&mutex_);
  if (closed_) return counters;
  const uint64_t step = last_step_->load(std::memory_order_relaxed);
  for (const StageHead& head : heads) {
    for (const StageRun& run : head.retrieved) {
      for (uint32_t block = 0; block < BlockCount(run.rows); ++block) {
        if (FindBlock(run, block, step).has_value()) {
          ++counters.hit_blocks;
          continue;
        }
        ++counters.miss_blocks;
        NoteMiss(run, block, misses);
      }
    }
  }
  return counters;
}

uint64_t SequenceRegion::Admit(std::span<const MissedBlock> blocks) {
  uint64_t admitted = 0;
  for (size_t first = 0; first < blocks.size(); first += kAdmitBatch) {
    const auto batch = blocks.subspan(first, std::min(kAdmitBatch, blocks.size() - first));
    std::vector<std::pair<const MissedBlock*, uint32_t>> taken;  // (block, slot)
    {
      MutexLock lock(&mutex_);
      if (closed_) return admitted;
      for (const MissedBlock& block : batch) {
        if (const auto slot = cache_->Admit(block.key, completed_step_)) {
          taken.emplace_back(&block, *slot);
          slots_written_ = std::max(slots_written_, *slot + 1);
        }
      }
      ++admitting_;
    }
    for (const auto& [block, slot] : taken) {
      CopyRows(block->rows, SlotSpan(slot, block->rows.row_count));
    }
    MutexLock lock(&mutex_);
    for (const auto& [block, slot] : taken) admitted += cache_->Publish(slot) ? 1 : 0;
    if (--admitting_ == 0) admitted_.NotifyAll();
  }
  return admitted;
}

void SequenceRegion::Close() {
  MutexLock lock(&mutex_);
  if (closed_) return;
  closed_ = true;
  while (admitting_ > 0) admitted_.Wait(&mutex_);
  Wipe();
  buffer_->Return(place_);
}

// Identity first, rows after: a reader that finds its sequence still named after it has read rows
// has read them whole.
void SequenceRegion::Wipe() {
  buffer_->Withdraw(place_);
  header()->sequence_id.store(0, std::memory_order_release);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // Only what was ever written: touching the rest would take memory for nothing.
  std::memset(buffer_->data() + place_.offset + layout_.cache_offset, 0,
              uint64_t{slots_written_} * layout_.slot_bytes);
  std::memset(buffer_->data() + place_.offset + layout_.staging_offset, 0, ring_.high_water());
  new (header()) RegionHeader{};
}

}  // namespace wavekv
