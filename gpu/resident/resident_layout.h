// A sequence's resident region as it lies in a wave buffer: docs/decisions/015-resident-region.md
// has the protocol, docs/formats.md the bytes. Plain structs, offsets instead of pointers: three
// parties read it, each with the buffer mapped elsewhere.
//
// A *unit* is one (layer, KV head): unit = layer * kv_head_count + kv_head. All units of a region
// are alike and lie one after another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/kernels/step_layout.h"

namespace wavekv::resident {

inline constexpr uint64_t kResidentMagic = 0x3153455245564157;  // "WAVERES1", little endian
inline constexpr uint32_t kResidentVersion = 2;
inline constexpr uint32_t kAlignBytes = 256;  // Of every array.
inline constexpr uint32_t kAreas = 2;
inline constexpr uint32_t kSinkRows = 8;  // Room; PublishedHead.sink_count are used.

// Offsets from the start of a unit. Everything that depends on max_tokens and the shape alone.
// Kernels read the arrays of clusters up to PublishedHead.cluster_count, also where the size is 0,
// and the means of all segments that there is room for: scales, spreads and means are finite
// everywhere, always.
struct UnitLayout {
  uint64_t unit_bytes;
  uint64_t published_offset;        // PublishedHead [kAreas]
  uint64_t sizes_offset;            // uint16_t [kAreas, cluster_capacity]; 0: not of this version
  uint64_t segments_offset;         // SegmentEntry [segment_capacity]
  uint64_t means_offset;            // float [segment_capacity, 3, head_dim] key mean, value mean,
                                    //   shares of the key spread
  uint64_t centroids_offset;        // int8_t [cluster_capacity, head_dim]
  uint64_t value_means_offset;      // int8_t [cluster_capacity, head_dim]
  uint64_t centroid_scales_offset;  // float [cluster_capacity], as the three that follow
  uint64_t value_scales_offset;
  uint64_t key_spreads_offset;
  uint64_t value_spreads_offset;
  uint64_t cluster_segment_offset;  // uint16_t [cluster_capacity] index of a SegmentEntry, below
                                    //   segment_capacity also where the size is 0
  uint64_t first_row_offset;        // uint32_t [cluster_capacity] row in its segment
  uint64_t first_block_offset;      // uint32_t [cluster_capacity] block of the unit
  uint64_t block_slots_offset;      // int32_t [block_capacity] slot of a block, negative: none
  uint64_t sink_offset;             // element [2, kSinkRows, head_dim] keys, values
  uint64_t ring_offset;             // element [2, ring_rows, head_dim] keys, values
  uint64_t slots_offset;            // element [slot_count, 2, kBlockRows, head_dim]
  uint64_t free_slots_offset;       // FreeSlot [slot_count] ring
  uint64_t log_offset;              // BlockUse [log_capacity] ring
  uint32_t cluster_capacity;        // Multiple of gpu::kClusterPad.
  uint32_t segment_capacity;
  uint32_t block_capacity;
  uint32_t ring_rows;  // Multiple of gpu::kBlockRows.
  uint32_t slot_count;
  uint32_t log_capacity;
};

inline constexpr uint64_t kRegionOpen = 1;
inline constexpr uint64_t kRegionClosed = 2;  // A step that finds it attends over nothing.

// At the start of the region, on a page of its own. Written before the region is announced, but
// for `state`.
struct ResidentHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t element;  // gpu::Element
  uint64_t sequence_id;
  uint64_t region_bytes;
  uint32_t layer_count;
  uint32_t kv_head_count;
  uint32_t head_dim;
  uint32_t reserved;
  uint64_t states_offset;  // gpu::HeadState [units], from the start of the region
  uint64_t units_offset;   // [units] of units.unit_bytes, from the start of the region
  UnitLayout unit;
  alignas(64) uint64_t state;  // kRegionOpen, kRegionClosed
};
static_assert(sizeof(ResidentHeader) <= 4096);

// What a version of a unit's index is, beside the arrays that all versions share.
struct PublishedHead {
  uint64_t version;        // Of the layer's index in the daemon.
  uint64_t steady_first;   // Positions from here on are exact, in the ring.
  uint32_t cluster_count;  // Ids from 0 to here may be in use; multiple of gpu::kClusterPad.
  uint32_t segment_count;  // Entries likewise.
  uint32_t retrieve_count;
  uint32_t sink_count;
  float value_scale_max;
  uint32_t reserved;
};

// Where a segment's rows lie: in a window of the block pool that the engine has registered.
struct SegmentEntry {
  uint64_t keys_offset;    // From the start of the window; [token_count, head_dim] element
  uint64_t values_offset;  // likewise
  uint32_t window;         // Index in the windows that the attachment named.
  uint32_t token_count;    // 0: the entry is not in use.
};

}  // namespace wavekv::resident
