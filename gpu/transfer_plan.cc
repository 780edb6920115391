#include "gpu/transfer_plan.h"

#include <algorithm>

#include "gpu/buffer_layout.h"

namespace wavekv {
namespace {

class Planner {
 public:
  Planner(uint64_t staging_bytes, uint64_t gather_bytes_max)
      : staging_bytes_(staging_bytes), gather_bytes_max_(gather_bytes_max) {}

  void Add(const ByteCopy& copy) {
    if (copy.bytes == 0) return;
    Begin(copy.offset);
    for (uint64_t done = 0; done < copy.bytes;) {
      if (used_ == staging_bytes_) {
        NextBatch();
        StartTransfer(copy.offset + done);
      }
      const uint64_t bytes =
          std::min({copy.bytes - done, staging_bytes_ - used_, gather_bytes_max_});
      Append(copy.source + done, bytes);
      done += bytes;
    }
  }

  std::vector<TransferBatch> Take() { return std::move(batches_); }

 private:
  TransferBatch& batch() { return batches_.back(); }

  // Makes what is appended next go to `offset`.
  void Begin(uint64_t offset) {
    if (batches_.empty()) NextBatch();
    if (!batch().transfers.empty()) {
      const TransferBatch::Transfer& last = batch().transfers.back();
      const uint64_t end = last.offset + last.bytes;
      if (offset >= end && offset - end < kRowAlignBytes &&
          used_ + (offset - end) < staging_bytes_) {
        if (offset > end) Append(nullptr, offset - end);
        return;
      }
    }
    if (AlignUp(used_, kRowAlignBytes) >= staging_bytes_) NextBatch();
    StartTransfer(offset);
  }

  void NextBatch() {
    batches_.emplace_back();
    used_ = 0;
  }

  void StartTransfer(uint64_t offset) {
    used_ = AlignUp(used_, kRowAlignBytes);
    batch().transfers.push_back({used_, offset, 0});
  }

  void Append(const std::byte* source, uint64_t bytes) {
    batch().gathers.push_back({source, used_, bytes});
    batch().transfers.back().bytes += bytes;
    used_ += bytes;
  }

  const uint64_t staging_bytes_;
  const uint64_t gather_bytes_max_;
  uint64_t used_ = 0;
  std::vector<TransferBatch> batches_;
};

}  // namespace

std::vector<TransferBatch> PlanTransfers(std::span<const ByteCopy> copies, uint64_t staging_bytes,
                                         uint64_t gather_bytes_max) {
  Planner planner(staging_bytes, gather_bytes_max);
  for (const ByteCopy& copy : copies) planner.Add(copy);
  return planner.Take();
}

}  // namespace wavekv
