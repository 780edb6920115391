// What a decode step reads and writes on the device: plain structs with raw device pointers
// (docs/decisions/010-gpu-step.md). A captured CUDA graph holds only `StepInputs::live`, the
// queries, the outputs and the workspace; everything else is reached through them and may change
// between steps.
//
// A *unit* is one KV head of one sequence of the batch: unit = sequence * kv_heads + kv_head.
#pragma once

#include <cstdint>

namespace wavekv::gpu {

inline constexpr uint32_t kBlockRows = 8;         // Tokens of a block: unit of cache and fetch.
inline constexpr uint32_t kClusterBlocksMax = 4;  // Of one cluster.
inline constexpr uint32_t kClusterPad = 16;       // Segments' clusters start at multiples of it.
inline constexpr uint32_t kGroupMax = 16;         // Query heads that share a KV head.
inline constexpr uint32_t kRetrieveMax = 16383;   // Clusters that a head retrieves in a step.
inline constexpr uint32_t kSelectCtasMax = 8;     // A portable thread block cluster.

enum class Element : uint32_t { kBF16, kF16 };

// A clustered segment of one head. Keys and values lie in the block pool (pinned host memory as the
// device sees it), sorted by cluster.
struct SegmentCopy {
  const void* keys;           // [row_count, head_dim] element, rows 16-byte aligned
  const void* values;         // [row_count, head_dim] element
  const float* key_mean;      // [head_dim]; stored centroid = key_mean + centroid_scale * int8
  const float* value_mean;    // [head_dim]; stored value mean likewise
  const float* spread_share;  // [head_dim] each dim's share of the segment's key spread
  uint32_t row_count;         // Its tokens; 0: no cluster with a size is in it.
};

// One head's part of what changes within a step. It lies where a client can write: whoever reads it
// checks it. Two writers, each with bytes of its own.
struct HeadState {
  // The kernels'. Epochs count steps.
  uint64_t started;           // Steps up to here may read what was published when they began ...
  uint64_t completed_epoch;   // ... and up to here read nothing any more; written last in each.
  uint64_t appended;          // Token positions appended so far: the end of the steady ring.
  uint64_t log_end;           // BlockUse entries ever written; the ring holds the last of them.
  uint64_t hits;              // Blocks ever asked for and found in the cache ...
  uint64_t misses;            // ... and not found.
  uint64_t free_head;         // Offered slots ever taken by the kernels.
  uint64_t overflows;         // Appends refused because the steady ring was full.
  uint64_t appended_settled;  // `appended` and `log_end` of the last step that completed: their
  uint64_t log_settled;       //   rows and entries are in place for whoever reads by DMA.
  uint64_t free_seen;         // Offers that have been seen: what they held is not in the table.
  uint64_t reserved;
  // The manager's.
  uint64_t free_tail;  // Slots ever offered.
  uint64_t published;  // Versions ever published; the current area is this modulo 2.
  uint64_t reserved_too[2];
};
static_assert(sizeof(HeadState) == 128);

// An entry of the log: which block a step used and where it was found. A claim names its place in
// the ring of free slots, so that an old entry is not taken for a new one.
struct BlockUse {
  uint32_t block;  // Flat block of the head, kMissBit set when it came from the pool.
  int32_t slot;    // Where it lies now; -1: in no slot.
  uint64_t place;  // Of the slot in the ring, of those ever offered; kNoPlace: it was not taken.
};
// An offer of a slot. A step that sees it takes the block that it held out of the table, if it is
// still there, before it looks anything up; it and later ones may fill the slot.
struct FreeSlot {
  uint32_t slot;
  uint32_t block;  // Flat block of the head; kNoBlock: none.
};
inline constexpr uint32_t kNoBlock = ~uint32_t{0};

inline constexpr uint64_t kNoPlace = ~uint64_t{0};
inline constexpr uint32_t kMissBit = 1u << 31;

// Arrays are 16-byte aligned. One (sequence, layer, KV head): immutable for as long as a step may
// have latched it, but for what `state`, `block_slots`, `slots` and the steady rows hold. Cluster
// arrays are padded: each segment's clusters start at a multiple of kClusterPad, padding has size 0
// and is finite.
struct HeadDescriptor {
  // Steady zone: `sink_count` first tokens, then positions [steady_first, state->appended),
  // position p in row p % steady_capacity (a multiple of kBlockRows) of the ring.
  const void* sink_keys;    // [sink_count, head_dim] element
  const void* sink_values;  // [sink_count, head_dim]
  void* steady_keys;        // [steady_capacity, head_dim]
  void* steady_values;      // [steady_capacity, head_dim]
  // Wave index copy.
  const int8_t* centroids;          // [cluster_count, head_dim]
  const int8_t* value_means;        // [cluster_count, head_dim]
  const float* centroid_scales;     // [cluster_count]
  const float* value_scales;        // [cluster_count]
  const float* key_spreads;         // [cluster_count] mean of |key - stored centroid|^2
  const float* value_spreads;       // [cluster_count] rms of |value - stored mean| / sqrt(size)
  const uint16_t* sizes;            // [cluster_count] tokens; 0: padding
  const uint16_t* cluster_segment;  // [cluster_count]
  const uint32_t* first_row;        // [cluster_count] row in its segment
  const uint32_t* first_block;      // [cluster_count] flat block of the head
  const SegmentCopy* segments;      // [segment_count]
  // Block cache. A slot holds kBlockRows rows of K, then as many of V.
  int32_t* block_slots;        // [block_count] slot of a block, negative: in none
  void* slots;                 // [slot_count, 2, kBlockRows, head_dim] element
  const FreeSlot* free_slots;  // [free_capacity] ring
  BlockUse* log;               // [log_capacity] ring
  HeadState* state;
  uint64_t steady_first;
  uint32_t steady_capacity;
  uint32_t sink_count;
  uint32_t cluster_count;
  uint32_t segment_count;
  uint32_t block_count;
  uint32_t slot_count;
  uint32_t free_capacity;
  uint32_t log_capacity;
  uint32_t retrieve_count;  // Clusters to retrieve: the budget, at most those with a size.
  float value_scale_max;    // Largest of value_scales.
};
// As threads copy it, a word each.
inline constexpr uint32_t kHeadWords = sizeof(HeadDescriptor) / sizeof(uint64_t);
static_assert(sizeof(HeadDescriptor) % sizeof(uint64_t) == 0);

// What the manager publishes for an entry of the batch. A seqlock: `version` is odd while it is
// written. A step latches it once, at its start; what it replaces stays valid until
// completed_epoch has passed it.
struct SequenceDescriptor {
  uint32_t version;
  uint32_t reserved;
  const HeadDescriptor* heads;  // [kv_heads]; null: this entry of the batch is empty
};

// Fixed when a step is captured.
struct StepShape {
  uint32_t batch = 0;
  uint32_t kv_heads = 0;
  uint32_t group = 0;     // Query heads per KV head, 1 to kGroupMax.
  uint32_t head_dim = 0;  // 64, 128 or 256, keys and values alike.
  Element element = Element::kBF16;
  float scale = 0;                 // Of the logits.
  bool rank_by_mass = false;       // Else by the expected error of estimating a cluster.
  uint32_t cluster_capacity = 0;   // Most clusters of a head, padding counted.
  uint32_t segment_capacity = 0;   // Most segments of a head.
  uint32_t retrieve_capacity = 0;  // Most clusters that a head retrieves.
};

// Into how many CTAs a unit's work is cut; only speed depends on it.
struct StepSplits {
  uint32_t steady = 1;
  uint32_t rank = 1;
  uint32_t misses = 1;
  uint32_t miss_warps = 4;  // Of a CTA of misses, that fetch; 1 to 4.
  uint32_t hits = 1;
  uint32_t estimate = 1;
  uint32_t select = 1;  // Power of two, at most kSelectCtasMax.
};

// A block to attend over, resolved.
struct BlockRef {
  const void* keys;  // Device or host memory.
  const void* values;
  uint32_t row_count;  // 1 to kBlockRows.
  int32_t fill_slot;   // Slot to copy it to; -1: none, or it comes from one.
};

// Mass of some clusters or rows for one query head, in base 2: sum of the weights 2^(logit - max).
// A partial output that belongs to it is the sum of the values with these weights.
struct PartialMass {
  float max;
  float sum;
};

// What a query head sees of a whole segment.
struct SegmentView {
  float mean_dot;  // q . key_mean
  // scale * sqrt(sum over dims of q^2 * spread_share): how far the logits of a cluster's tokens
  // scatter, for a spread of 1.
  float reach;
};

struct UnitCounts {
  uint32_t retrieved;
  uint32_t hits;
  uint32_t misses;
  uint32_t arrivals;  // Of the unit's CTAs at the merge; zero between steps.
};

// Scratch of one step, in device memory; zeroed once, before the first step.
struct StepWorkspace {
  HeadDescriptor* heads;   // [units] latched
  int8_t* query_bytes;     // [units, 2, kGroupMax, head_dim] high, low: q = scale (128 high + low)
  float* query_scales;     // [units, kGroupMax]
  SegmentView* views;      // [units, segment_capacity, group]
  float* logits;           // [units, group, cluster_capacity] log2 of the estimated mass
  float* ranks;            // likewise: log2 of the rank times the mass; -inf: padding
  PartialMass* rank_mass;  // [units, splits.rank, group]
  float* cluster_mass;     // [units, group] log2 of all clusters' estimated mass
  uint32_t* retrieved;     // [units, retrieve_capacity] ascending
  BlockRef* blocks;    // [units, kClusterBlocksMax * retrieve_capacity] hits, misses from the end
  UnitCounts* counts;  // [units]
  float* partial_out;  // [units, partials, group, head_dim]
  PartialMass* partial_mass;  // [units, partials, group]
};

struct StepInputs {
  const SequenceDescriptor* live;  // [batch]
  const void* queries;             // [batch, kv_heads * group, head_dim] element
  const void* new_keys;            // [batch, kv_heads, head_dim] appended first; null: none
  const void* new_values;          // [batch, kv_heads, head_dim]
  void* out;                       // [batch, kv_heads * group, head_dim] element
  float* lse;                      // [batch, kv_heads * group] natural log
};

struct Step {
  StepShape shape;
  StepSplits splits;
  StepInputs inputs;
  StepWorkspace workspace;
};

}  // namespace wavekv::gpu
