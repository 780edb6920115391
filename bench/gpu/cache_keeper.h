// Keeps the block caches of a benchmark's layer between its steps with the books that wavekvd keeps
// beside a running engine (docs/decisions/015-resident-region.md), but with the stream drained: a
// round hears all of a step, and nothing has to wait for an epoch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "bench/block_trace.h"
#include "bench/gpu/bench_index.h"
#include "gpu/resident/cache_books.h"

namespace wavekv::bench {

// Every unit has a cache of its own. One thread at a time.
class CacheKeeper {
 public:
  // The layer's arrays lie at `base`; a unit's cache holds `cache_ratio` of its blocks.
  CacheKeeper(const BuiltLayer& built, void* base, double cache_ratio);

  // Empties the caches and offers all slots.
  absl::Status Reset();
  // After a step: reads what it used and took, and offers slots for the next one.
  absl::Status Round();

  // Over the steps from `first_step` on, all units.
  CacheHits Hits(uint32_t first_step) const;
  // What a cache of the same size that knows the future would have hit, on the steps so far.
  CacheHits BeladyHits(uint32_t first_step) const;

 private:
  struct Unit {
    std::unique_ptr<resident::CacheBooks> books;
    uint64_t log_read = 0;
    BlockTrace uses;
    std::vector<uint32_t> hits;  // Of each step.
  };

  absl::Status RoundOf(uint32_t unit, const gpu::HeadState& state);
  // Ends a round of the books and writes what follows.
  absl::Status Offer(uint32_t unit);

  const BuiltLayer& built_;
  const LayerArrays arrays_;
  const double cache_ratio_;
  std::vector<Unit> units_;
};

}  // namespace wavekv::bench
