#include "gpu/sequence_region.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/log.h"
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
  uint64_t begin = 0;           // Of the free piece, from the start of the buffer.
  uint64_t capacity_bytes = 0;  // Of it.
  uint64_t used_bytes = 0;
  std::vector<ByteCopy> copies;  // Ascending.
  std::vector<MissedBlock>* misses = nullptr;
  StagedStep step;

  uint64_t left_bytes() const { return capacity_bytes - used_bytes; }
};

absl::StatusOr<std::shared_ptr<SequenceRegion>> SequenceRegion::Create(
    std::shared_ptr<TenantBuffer> buffer, SequenceId sequence, uint32_t kv_head_count,
    const RegionLayout& layout, std::shared_ptr<std::atomic<uint64_t>> last_step) {
  WAVEKV_ASSIGN_OR_RETURN(const RegionPlace place, buffer->Carve(layout.region_bytes));
  std::shared_ptr<SequenceRegion> region(new SequenceRegion(
      std::move(buffer), place, sequence, kv_head_count, layout, std::move(last_step)));
  WAVEKV_RETURN_IF_ERROR(region->WriteHeader());  // Or else it closes itself.
  return region;
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
      ring_(layout.staging_bytes) {}

absl::Status SequenceRegion::WriteHeader() {
  RegionHeader header{};
  header.magic = kRegionMagic;
  header.region_bytes = place_.bytes;
  header.cache_offset = place_.offset + layout_.cache_offset;
  header.staging_offset = place_.offset + layout_.staging_offset;
  header.staging_bytes = layout_.staging_bytes;
  header.slot_bytes = layout_.slot_bytes;
  header.slot_count = layout_.slot_count;
  header.key_row_bytes = layout_.key_row_bytes;
  header.value_row_bytes = layout_.value_row_bytes;
  const ByteCopy copy{reinterpret_cast<const std::byte*>(&header), place_.offset, sizeof(header)};
  WAVEKV_RETURN_IF_ERROR(buffer_->memory().Write(
      {&copy, 1},
      BufferWord{place_.offset + offsetof(RegionHeader, sequence_id), sequence_.value()}));
  return buffer_->Announce(place_, sequence_);
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
  AppendCopies(rows, span, &plan->copies);
  return span;
}

void SequenceRegion::AppendCopies(const RowRun& rows, const StagedSpan& span,
                                  std::vector<ByteCopy>* copies) const {
  if (rows.row_count == 0) return;
  copies->push_back({rows.keys, span.key_offset, uint64_t{rows.row_count} * layout_.key_row_bytes});
  copies->push_back(
      {rows.values, span.value_offset, uint64_t{rows.row_count} * layout_.value_row_bytes});
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
  last_step_->store(plan.step.step, std::memory_order_relaxed);
  // Readers that see this step see its rows.
  const BufferWord announced{place_.offset + offsetof(RegionHeader, step), plan.step.step};
  WAVEKV_RETURN_IF_ERROR(buffer_->memory().Write(plan.copies, announced));
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

absl::Status SequenceRegion::FillSlots(std::span<const MissedBlock* const> batch,
                                       std::span<const uint32_t> slots) const {
  std::vector<ByteCopy> copies;
  for (size_t i = 0; i < batch.size(); ++i) {
    const RowRun& rows = batch[i]->rows;
    AppendCopies(rows, SlotSpan(slots[i], rows.row_count), &copies);
  }
  return buffer_->memory().Write(copies);
}

uint64_t SequenceRegion::Admit(std::span<const MissedBlock> blocks) {
  uint64_t admitted = 0;
  absl::Status status;
  for (size_t first = 0; first < blocks.size() && status.ok(); first += kAdmitBatch) {
    std::vector<const MissedBlock*> batch;
    std::vector<uint32_t> slots;  // Of each.
    {
      MutexLock lock(&mutex_);
      if (closed_) return admitted;
      for (const MissedBlock& block :
           blocks.subspan(first, std::min(kAdmitBatch, blocks.size() - first))) {
        const std::optional<uint32_t> slot = cache_->Admit(block.key, completed_step_);
        if (!slot.has_value()) continue;
        batch.push_back(&block);
        slots.push_back(*slot);
        slots_written_ = std::max(slots_written_, *slot + 1);
      }
      ++admitting_;
    }
    status = FillSlots(batch, slots);
    MutexLock lock(&mutex_);
    for (const uint32_t slot : slots) admitted += cache_->Publish(slot, status.ok()) ? 1 : 0;
    if (--admitting_ == 0) admitted_.NotifyAll();
  }
  if (!status.ok()) Log(LogLevel::kWarning, "blocks_not_admitted", {{"error", status}});
  return admitted;
}

void SequenceRegion::Close() {
  MutexLock lock(&mutex_);
  if (closed_) return;
  closed_ = true;
  while (admitting_ > 0) admitted_.Wait(&mutex_);
  const absl::Status status = Wipe();
  if (status.ok()) return buffer_->Return(place_);
  Log(LogLevel::kWarning, "region_not_wiped",
      {{"sequence", sequence_.value()}, {"bytes", place_.bytes}, {"error", status}});
}

// Identity first, rows after: a reader that finds its sequence still named after it has read rows
// has read them whole.
absl::Status SequenceRegion::Wipe() {
  BufferMemory& memory = buffer_->memory();
  WAVEKV_RETURN_IF_ERROR(buffer_->Withdraw(place_));
  WAVEKV_RETURN_IF_ERROR(memory.Store(place_.offset + offsetof(RegionHeader, sequence_id), 0));
  // Only what was ever written: touching the rest would take memory for nothing.
  WAVEKV_RETURN_IF_ERROR(memory.Zero(place_.offset + layout_.cache_offset,
                                     uint64_t{slots_written_} * layout_.slot_bytes));
  WAVEKV_RETURN_IF_ERROR(memory.Zero(place_.offset + layout_.staging_offset, ring_.high_water()));
  return memory.Zero(place_.offset, sizeof(RegionHeader));
}

}  // namespace wavekv
