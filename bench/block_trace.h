// Which blocks the steps of a decode ask for, and how many of them a block cache would have had.
#pragma once

#include <cstdint>
#include <vector>

#include "storage/block_cache_policy.h"

namespace wavekv::bench {

// The blocks of each step, each once.
using BlockTrace = std::vector<std::vector<BlockKey>>;

struct CacheHits {
  uint64_t lookups = 0;
  uint64_t hits = 0;
  CacheHits& operator+=(const CacheHits& other) {
    lookups += other.lookups;
    hits += other.hits;
    return *this;
  }
  double ratio() const {
    return lookups == 0 ? 0 : static_cast<double>(hits) / static_cast<double>(lookups);
  }
};

// As the wave buffer does it: a step looks all its blocks up, then what was missed is admitted and
// is there for the next step. Counts from step `first_counted` on.
CacheHits Replay(const BlockTrace& trace, size_t first_counted, BlockCachePolicy* policy);

// The most hits that any cache of `slots` blocks could have had: it knows the future, keeps what is
// asked for again soonest and admits nothing else (L. A. Belady, "A study of replacement algorithms
// for a virtual-storage computer", 1966).
CacheHits ReplayBelady(const BlockTrace& trace, size_t first_counted, uint32_t slots);

}  // namespace wavekv::bench
