#include "proto/shm/arena_allocator.h"

#include <iterator>

#include "proto/shm/channel_layout.h"
#include "storage/base/check.h"

namespace wavekv::shm {
ArenaAllocator::ArenaAllocator(uint64_t begin, uint64_t bytes)
    : total_bytes_(bytes), free_bytes_(bytes), free_{{begin, bytes}} {}

std::optional<uint64_t> ArenaAllocator::Allocate(uint64_t bytes) {
  if (bytes == 0 || bytes > free_bytes_) return std::nullopt;
  const uint64_t rounded = ArenaRounded(bytes);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < rounded) continue;
    const uint64_t offset = it->first;
    if (it->second == rounded) {
      free_.erase(it);
    } else {
      // The node is kept: a call in an idle channel allocates nothing.
      auto node = free_.extract(it);
      node.key() = offset + rounded;
      node.mapped() -= rounded;
      free_.insert(std::move(node));
    }
    free_bytes_ -= rounded;
    return offset;
  }
  return std::nullopt;
}

void ArenaAllocator::Free(uint64_t offset, uint64_t bytes) {
  const uint64_t rounded = ArenaRounded(bytes);
  free_bytes_ += rounded;
  const auto next = free_.lower_bound(offset);
  WAVEKV_CHECK(next == free_.end() || offset + rounded <= next->first, "freed twice in an arena");
  const bool joins_next = next != free_.end() && offset + rounded == next->first;
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    WAVEKV_CHECK(before->first + before->second <= offset, "freed twice in an arena");
    if (before->first + before->second == offset) {
      before->second += rounded;
      if (joins_next) {
        before->second += next->second;
        free_.erase(next);
      }
      return;
    }
  }
  if (!joins_next) {
    free_.emplace_hint(next, offset, rounded);
    return;
  }
  auto node = free_.extract(next);
  node.key() = offset;
  node.mapped() += rounded;
  free_.insert(std::move(node));
}

}  // namespace wavekv::shm
