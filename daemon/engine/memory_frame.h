// A run of the pool that holds token positions at fixed places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "daemon/engine/cut_plan.h"
#include "storage/base/mutex.h"
#include "storage/block_pool.h"

namespace wavekv {

// Memory for the rows of some token positions, all KV heads. `owner` keeps it.
struct RowMemory {
  std::byte* base = nullptr;
  std::shared_ptr<const void> owner;
};

// Room for capacity_tokens tokens of token_bytes each, handed out by range: a range's place follows
// from its positions, so what is given back always fits what comes next. A range is free again when
// the last owner of its memory has gone, so that nobody's rows are written twice; a private run's
// pages go back to the kernel then.
//
// Thread-safe. Its run goes back to the pool with the last range.
class MemoryFrame : public std::enable_shared_from_this<MemoryFrame> {
 public:
  MemoryFrame(std::shared_ptr<Run> run, uint64_t first_position, uint64_t capacity_tokens,
              size_t token_bytes);

  // The place of `range`, which lies in the frame; nothing while any of it is in use.
  std::optional<RowMemory> Take(const TokenRange& range);
  // The first free place of `tokens` tokens that begins at a multiple of that.
  std::optional<RowMemory> TakeAny(uint64_t tokens);

 private:
  RowMemory TakeLocked(const TokenRange& range) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Return(const TokenRange& range);

  const std::shared_ptr<Run> run_;
  const uint64_t first_position_;
  const uint64_t capacity_tokens_;
  const size_t token_bytes_;
  Mutex mutex_;
  std::map<uint64_t, uint64_t> taken_ ABSL_GUARDED_BY(mutex_);  // Begin -> end of a range.
};

}  // namespace wavekv
