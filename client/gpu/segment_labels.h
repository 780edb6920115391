// Which tokens of a layer belong together, for a segment that the daemon will cut: what a client
// that clusters keys by itself asks for, and what it gives.
#pragma once

#include <cstdint>
#include <span>

namespace wavekv::client {

// A segment that the daemon will cut, and how many clusters its k-means would look for.
struct PlannedSegment {
  uint64_t first_position = 0;
  uint32_t token_count = 0;
  uint32_t cluster_count = 0;
};

// Which cluster each token of a planned segment belongs to. Borrowed: `labels` outlives the call.
struct SegmentLabels {
  uint64_t first_position = 0;
  uint32_t token_count = 0;
  std::span<const uint16_t> labels;  // [kv_heads, token_count], below its cluster_count.
};

}  // namespace wavekv::client
