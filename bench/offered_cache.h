// A block cache whose slots only steps fill, as wavekvd keeps it beside a running engine
// (docs/decisions/015-resident-region.md, "How the cache is kept"), on a trace instead of a device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bench/block_trace.h"

namespace wavekv::bench {

struct OfferedOptions {
  uint32_t slots = 0;
  // Of a round's uses the policy hears as many as so many clusters may have blocks.
  uint32_t clusters_per_step = 0;
  uint32_t steps_per_round = 1;
  size_t first_counted = 0;  // Step.
  uint64_t seed = 0;
};

// Plays the steps of one unit (a sequence, layer and KV head) and, after every `steps_per_round` of
// them, a round of the manager's books. Misses take the slots on offer in an order that `seed`
// draws. (On a device it is that of the clusters' numbers, which say nothing of their worth.)
CacheHits ReplayOffered(const BlockTrace& trace, const OfferedOptions& options);

}  // namespace wavekv::bench
