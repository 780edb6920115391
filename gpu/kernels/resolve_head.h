// From the offsets of a resident region to the pointers that a step follows, for one unit: what the
// resolve kernel does (docs/decisions/015-resident-region.md). Plain C++, so that the checks are
// tested without a GPU.
//
// The region lies where other processes write: every number is read once, and its copy is checked.
// What the arrays hold (a cluster's first row, its segment) is not looked at: whoever writes there
// spoils the buffer of its own tenant.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gpu/kernels/step_layout.h"
#include "gpu/resident/resident_layout.h"

#ifdef __CUDACC__
#define WAVEKV_HOST_DEVICE __host__ __device__
#else
#define WAVEKV_HOST_DEVICE
#endif

namespace wavekv::gpu {

// Memory that a region's segments may lie in, as the device sees it.
struct ResolveWindow {
  const char* data;
  uint64_t bytes;
};

// An entry of the batch: written by the engine's own process, and trusted.
struct ResolveEntry {
  char* region;  // null: the entry is empty
  uint64_t region_bytes;
  const ResolveWindow* windows;  // [window_count]
  uint64_t sequence_id;
  uint32_t window_count;
  uint32_t tag;  // Comes back with the code, so that the host knows which attachment it is about.
};

enum class ResolveCode : uint32_t {
  kEmpty = 0,
  kOk = 1,
  kClosed = 2,      // By the daemon.
  kDoesNotFit = 3,  // More than the capacities that the step was captured with.
  kMalformed = 4,   // Not a region of this sequence and model, or a number that cannot be.
};

// What a step was captured for.
struct ResolveShape {
  uint32_t layer_count = 0;
  uint32_t kv_heads = 0;
  uint32_t head_dim = 0;
  Element element = Element::kBF16;
  uint32_t cluster_capacity = 0;
  uint32_t segment_capacity = 0;  // At most 65536.
  uint32_t retrieve_capacity = 0;
};

// Where a unit's segments are described, inside its region.
struct SegmentSource {
  const char* entries;  // resident::SegmentEntry [count], not yet checked
  const float* means;   // [count, 3, head_dim]
  uint32_t count;       // All that there is room for: see DescribeSegment.
};

// A unit's part of a step. Unless the code is kOk, `head` is zero and attends over nothing. Its
// `segments` are for the caller to fill, by DescribeSegment.
struct ResolvedHead {
  ResolveCode code = ResolveCode::kEmpty;
  HeadDescriptor head = {};
  SegmentSource segments = {};
};

namespace resolve_internal {

// Of the whole system: nothing before it is seen after what comes behind it.
WAVEKV_HOST_DEVICE inline void FenceSystem() {
#ifdef __CUDA_ARCH__
  __threadfence_system();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// One word that another process may be writing.
WAVEKV_HOST_DEVICE inline uint64_t LoadWord(const void* at) {
#ifdef __CUDA_ARCH__
  uint64_t word;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
#else
  return __atomic_load_n(static_cast<const uint64_t*>(at), __ATOMIC_RELAXED);
#endif
}

// Likewise; what is read after it is no older than what its writer had written before.
WAVEKV_HOST_DEVICE inline uint64_t LoadWordFirst(const void* at) {
#ifdef __CUDA_ARCH__
  uint64_t word;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(at) : "memory");
  return word;
#else
  return __atomic_load_n(static_cast<const uint64_t*>(at), __ATOMIC_ACQUIRE);
#endif
}

WAVEKV_HOST_DEVICE inline void StoreWord(uint64_t* at, uint64_t word) {
#ifdef __CUDA_ARCH__
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(at), "l"(word) : "memory");
#else
  __atomic_store_n(at, word, __ATOMIC_RELAXED);
#endif
}

// A copy of what lies at `at`, each word read once.
template <typename T>
WAVEKV_HOST_DEVICE T CopyOut(const char* at) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0);
  uint64_t words[sizeof(T) / sizeof(uint64_t)];
  for (size_t i = 0; i < sizeof(T) / sizeof(uint64_t); ++i) {
    words[i] = LoadWord(at + i * sizeof(uint64_t));
  }
  T copy;
  memcpy(&copy, words, sizeof(T));
  return copy;
}

// Whether `count` elements of `element_bytes` (which cannot overflow together) at `offset` lie
// within `bytes`, on a 16-byte boundary.
WAVEKV_HOST_DEVICE inline bool Fits(uint64_t offset, uint64_t count, uint64_t element_bytes,
                                    uint64_t bytes) {
  const uint64_t length = count * element_bytes;
  return offset % 16 == 0 && offset <= bytes && length <= bytes - offset;
}

// Whether every array of a unit lies within it.
WAVEKV_HOST_DEVICE inline bool UnitIsSound(const resident::UnitLayout& unit, uint64_t head_dim) {
  const uint64_t clusters = unit.cluster_capacity, segments = unit.segment_capacity;
  const uint64_t row = 2 * head_dim, end = unit.unit_bytes;
  return end % 16 == 0 && clusters % kClusterPad == 0 && unit.ring_rows % kBlockRows == 0 &&
         unit.ring_rows > 0 && unit.slot_count <= INT32_MAX &&
         Fits(unit.published_offset, resident::kAreas, sizeof(resident::PublishedHead), end) &&
         Fits(unit.sizes_offset, resident::kAreas * clusters, sizeof(uint16_t), end) &&
         Fits(unit.segments_offset, segments, sizeof(resident::SegmentEntry), end) &&
         Fits(unit.means_offset, segments, 3 * head_dim * sizeof(float), end) &&
         Fits(unit.centroids_offset, clusters, head_dim, end) &&
         Fits(unit.value_means_offset, clusters, head_dim, end) &&
         Fits(unit.centroid_scales_offset, clusters, sizeof(float), end) &&
         Fits(unit.value_scales_offset, clusters, sizeof(float), end) &&
         Fits(unit.key_spreads_offset, clusters, sizeof(float), end) &&
         Fits(unit.value_spreads_offset, clusters, sizeof(float), end) &&
         Fits(unit.cluster_segment_offset, clusters, sizeof(uint16_t), end) &&
         Fits(unit.first_row_offset, clusters, sizeof(uint32_t), end) &&
         Fits(unit.first_block_offset, clusters, sizeof(uint32_t), end) &&
         Fits(unit.block_slots_offset, unit.block_capacity, sizeof(int32_t), end) &&
         Fits(unit.sink_offset, 2 * resident::kSinkRows, row, end) &&
         Fits(unit.ring_offset, 2 * uint64_t{unit.ring_rows}, row, end) &&
         Fits(unit.slots_offset, unit.slot_count, 2 * kBlockRows * row, end) &&
         Fits(unit.free_slots_offset, unit.slot_count, sizeof(FreeSlot), end) &&
         Fits(unit.log_offset, unit.log_capacity, sizeof(BlockUse), end);
}

}  // namespace resolve_internal

// Whether it is the header of the entry's region, with everything inside.
WAVEKV_HOST_DEVICE inline bool HeaderIsSound(const resident::ResidentHeader& header,
                                             const ResolveEntry& entry, const ResolveShape& shape) {
  const uint64_t units = uint64_t{shape.layer_count} * shape.kv_heads;
  return header.magic == resident::kResidentMagic && header.version == resident::kResidentVersion &&
         header.sequence_id == entry.sequence_id &&
         header.element == static_cast<uint32_t>(shape.element) &&
         header.layer_count == shape.layer_count && header.kv_head_count == shape.kv_heads &&
         header.head_dim == shape.head_dim && header.region_bytes <= entry.region_bytes &&
         resolve_internal::Fits(header.states_offset, units, sizeof(HeadState),
                                header.region_bytes) &&
         // A unit of more than the region would overflow the product.
         header.unit.unit_bytes <= header.region_bytes / units &&
         resolve_internal::Fits(header.units_offset, units, header.unit.unit_bytes,
                                header.region_bytes) &&
         resolve_internal::UnitIsSound(header.unit, shape.head_dim);
}

namespace resolve_internal {

WAVEKV_HOST_DEVICE inline ResolveCode CheckPublished(const resident::PublishedHead& published,
                                                     const resident::UnitLayout& unit,
                                                     const ResolveShape& shape, uint64_t appended) {
  const uint64_t oldest = published.steady_first / kBlockRows * kBlockRows;
  if (published.cluster_count > unit.cluster_capacity ||
      published.cluster_count % kClusterPad != 0 ||
      published.segment_count > unit.segment_capacity ||
      (published.cluster_count > 0 && published.segment_count == 0) ||
      published.sink_count > resident::kSinkRows ||
      // More exact rows than the ring has.
      (appended > oldest && appended - oldest > unit.ring_rows)) {
    return ResolveCode::kMalformed;
  }
  const bool fits = published.cluster_count <= shape.cluster_capacity &&
                    unit.segment_capacity <= shape.segment_capacity;
  return fits ? ResolveCode::kOk : ResolveCode::kDoesNotFit;
}

WAVEKV_HOST_DEVICE inline HeadDescriptor Describe(const resident::UnitLayout& unit, char* base,
                                                  const resident::PublishedHead& published,
                                                  uint64_t area, HeadState* state,
                                                  const ResolveShape& shape) {
  const uint64_t row = 2 * uint64_t{shape.head_dim};
  HeadDescriptor head = {};
  head.sink_keys = base + unit.sink_offset;
  head.sink_values = base + unit.sink_offset + resident::kSinkRows * row;
  head.steady_keys = base + unit.ring_offset;
  head.steady_values = base + unit.ring_offset + unit.ring_rows * row;
  head.centroids = reinterpret_cast<const int8_t*>(base + unit.centroids_offset);
  head.value_means = reinterpret_cast<const int8_t*>(base + unit.value_means_offset);
  head.centroid_scales = reinterpret_cast<const float*>(base + unit.centroid_scales_offset);
  head.value_scales = reinterpret_cast<const float*>(base + unit.value_scales_offset);
  head.key_spreads = reinterpret_cast<const float*>(base + unit.key_spreads_offset);
  head.value_spreads = reinterpret_cast<const float*>(base + unit.value_spreads_offset);
  head.sizes =
      reinterpret_cast<const uint16_t*>(base + unit.sizes_offset) + area * unit.cluster_capacity;
  head.cluster_segment = reinterpret_cast<const uint16_t*>(base + unit.cluster_segment_offset);
  head.first_row = reinterpret_cast<const uint32_t*>(base + unit.first_row_offset);
  head.first_block = reinterpret_cast<const uint32_t*>(base + unit.first_block_offset);
  head.block_slots = reinterpret_cast<int32_t*>(base + unit.block_slots_offset);
  head.slots = base + unit.slots_offset;
  head.free_slots = reinterpret_cast<const FreeSlot*>(base + unit.free_slots_offset);
  head.log = reinterpret_cast<BlockUse*>(base + unit.log_offset);
  head.state = state;
  head.steady_first = published.steady_first;
  head.steady_capacity = unit.ring_rows;
  head.sink_count = published.sink_count;
  head.cluster_count = published.cluster_count;
  head.segment_count = unit.segment_capacity;
  head.block_count = unit.block_capacity;
  head.slot_count = unit.slot_count;
  head.free_capacity = unit.slot_count;
  head.log_capacity = unit.log_capacity;
  // What a step has no room for is estimated.
  head.retrieve_count = published.retrieve_count < shape.retrieve_capacity
                            ? published.retrieve_count
                            : shape.retrieve_capacity;
  head.value_scale_max = published.value_scale_max;
  return head;
}

}  // namespace resolve_internal

// Begins a step of unit `unit` (layer * kv_heads + kv_head) of the entry: writes `started`, then
// reads what is published. A step that attends over nothing completes here and now.
WAVEKV_HOST_DEVICE inline ResolvedHead ResolveHead(const ResolveEntry& entry,
                                                   const ResolveShape& shape, uint32_t unit) {
  using resident::PublishedHead;
  using resident::ResidentHeader;
  ResolvedHead resolved;
  if (entry.region == nullptr) return resolved;
  resolved.code = ResolveCode::kMalformed;
  if (entry.region_bytes < sizeof(ResidentHeader)) return resolved;
  // But for its state it stays as it is for as long as the region lives.
  const auto header = resolve_internal::CopyOut<ResidentHeader>(entry.region);
  if (!HeaderIsSound(header, entry, shape)) return resolved;
  char* const base = entry.region + header.units_offset + unit * header.unit.unit_bytes;
  auto* const state = reinterpret_cast<HeadState*>(entry.region + header.states_offset) + unit;

  const uint64_t started = resolve_internal::LoadWord(&state->completed_epoch) + 1;
  resolve_internal::StoreWord(&state->started, started);
  // Either the manager sees that this step has begun, or the step what the manager did before it
  // looked.
  resolve_internal::FenceSystem();
  const uint64_t life = resolve_internal::LoadWord(entry.region + offsetof(ResidentHeader, state));
  const uint64_t versions = resolve_internal::LoadWordFirst(&state->published);
  const uint64_t area = versions % resident::kAreas;
  const auto published = resolve_internal::CopyOut<PublishedHead>(
      base + header.unit.published_offset + area * sizeof(PublishedHead));
  if (life == resident::kRegionClosed) {
    resolved.code = ResolveCode::kClosed;
  } else if (life == resident::kRegionOpen && versions > 0) {
    resolved.code = resolve_internal::CheckPublished(published, header.unit, shape,
                                                     resolve_internal::LoadWord(&state->appended));
  }
  if (resolved.code != ResolveCode::kOk) {
    resolve_internal::StoreWord(&state->completed_epoch, started);
    return resolved;
  }
  resolved.head = resolve_internal::Describe(header.unit, base, published, area, state, shape);
  resolved.segments.entries = base + header.unit.segments_offset;
  resolved.segments.means = reinterpret_cast<const float*>(base + header.unit.means_offset);
  resolved.segments.count = header.unit.segment_capacity;
  return resolved;
}

// Segment `i` of a unit. Its means are always inside the region, whether or not a version uses it:
// kernels read them for clusters without a size, and such a cluster may already name a segment of
// the next version. Rows that do not lie in their window are null: no cluster of a sound version
// names such a segment, but an entry may be half written for the next one.
WAVEKV_HOST_DEVICE inline SegmentCopy DescribeSegment(const SegmentSource& unit,
                                                      const ResolveEntry& entry, uint32_t head_dim,
                                                      uint32_t i) {
  const auto source = resolve_internal::CopyOut<resident::SegmentEntry>(
      unit.entries + i * sizeof(resident::SegmentEntry));
  SegmentCopy copy = {};
  copy.key_mean = unit.means + uint64_t{i} * 3 * head_dim;
  copy.value_mean = copy.key_mean + head_dim;
  copy.spread_share = copy.value_mean + head_dim;
  if (source.token_count == 0 || source.window >= entry.window_count) return copy;
  const ResolveWindow& window = entry.windows[source.window];
  const uint64_t row = 2 * uint64_t{head_dim};
  if (!resolve_internal::Fits(source.keys_offset, source.token_count, row, window.bytes) ||
      !resolve_internal::Fits(source.values_offset, source.token_count, row, window.bytes)) {
    return copy;
  }
  copy.keys = window.data + source.keys_offset;
  copy.values = window.data + source.values_offset;
  copy.row_count = source.token_count;
  return copy;
}

}  // namespace wavekv::gpu
