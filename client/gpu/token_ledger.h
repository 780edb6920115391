// How many tokens an engine may submit before the daemon has taken over what was appended: the ring
// of exact tokens has so many rows (docs/decisions/015-resident-region.md). Internal to the SDK.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gpu/kernels/step_layout.h"

namespace wavekv::client {

// Of one sequence. Not thread-safe.
class TokenLedger {
 public:
  TokenLedger(uint64_t token_count, uint64_t steady_first, uint32_t ring_rows, uint64_t max_tokens)
      : tokens_(token_count),
        steady_first_(steady_first),
        ring_rows_(ring_rows),
        max_tokens_(max_tokens) {}

  // Tokens that can be submitted now. A step appends where the ring, which begins with the block of
  // `steady_first`, has a row left, and the daemon stores no more than max_tokens.
  uint64_t Room() const {
    const uint64_t end =
        std::min(steady_first_ / gpu::kBlockRows * gpu::kBlockRows + ring_rows_, max_tokens_);
    return end > tokens_ ? end - tokens_ : 0;
  }
  // Tokens that are stored, or will be when all that was submitted has run.
  uint64_t tokens() const { return tokens_; }

  void Submit() { ++tokens_; }
  // The daemon's index covers positions up to here. What it said before may arrive later.
  void NoteCovered(uint64_t steady_first) { steady_first_ = std::max(steady_first_, steady_first); }
  // Tokens were inserted or taken back while no step was under way.
  void Reset(uint64_t token_count, uint64_t steady_first) {
    tokens_ = token_count;
    steady_first_ = steady_first;
  }

 private:
  uint64_t tokens_;
  uint64_t steady_first_;
  uint32_t ring_rows_;
  uint64_t max_tokens_;
};

}  // namespace wavekv::client
