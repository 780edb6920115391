#include "daemon/engine/memory_frame.h"

#include <iterator>
#include <utility>

#include "storage/base/check.h"

namespace wavekv {

MemoryFrame::MemoryFrame(std::shared_ptr<Run> run, uint64_t first_position,
                         uint64_t capacity_tokens, size_t token_bytes)
    : run_(std::move(run)),
      first_position_(first_position),
      capacity_tokens_(capacity_tokens),
      token_bytes_(token_bytes) {
  WAVEKV_CHECK(run_->bytes() >= capacity_tokens * token_bytes, "a frame's run holds its tokens");
}

std::optional<RowMemory> MemoryFrame::Take(const TokenRange& range) {
  WAVEKV_CHECK(range.begin >= first_position_ && range.begin < range.end &&
                   range.end <= first_position_ + capacity_tokens_,
               "a range lies in its frame");
  MutexLock lock(&mutex_);
  const auto next = taken_.upper_bound(range.begin);
  if (next != taken_.end() && next->first < range.end) return std::nullopt;
  if (next != taken_.begin() && std::prev(next)->second > range.begin) return std::nullopt;
  return TakeLocked(range);
}

std::optional<RowMemory> MemoryFrame::TakeAny(uint64_t tokens) {
  MutexLock lock(&mutex_);
  uint64_t begin = first_position_;
  for (const auto& [taken_begin, taken_end] : taken_) {
    if (begin + tokens <= taken_begin) break;
    begin = taken_end;
  }
  if (begin + tokens > first_position_ + capacity_tokens_) return std::nullopt;
  return TakeLocked({begin, begin + tokens});
}

RowMemory MemoryFrame::TakeLocked(const TokenRange& range) {
  taken_.emplace(range.begin, range.end);
  std::byte* const base = run_->data() + (range.begin - first_position_) * token_bytes_;
  return {base, std::shared_ptr<const void>(base, [frame = shared_from_this(), range](const void*) {
            frame->Return(range);
          })};
}

void MemoryFrame::Return(const TokenRange& range) {
  // Before anybody can take it anew.
  run_->Discard((range.begin - first_position_) * token_bytes_, range.size() * token_bytes_);
  MutexLock lock(&mutex_);
  taken_.erase(range.begin);
}

}  // namespace wavekv
