// Segments as clusters name them.
#pragma once

#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

// The segment that a cluster names. The number lies where a client can write: one that there is
// none of is taken for the last.
__device__ inline const SegmentCopy& SegmentOf(const HeadDescriptor& head, uint32_t number) {
  return head.segments[min(number, head.segment_count - 1)];
}

// Whether `count` rows from `first` lie in the segment; likewise.
__device__ inline bool HasRows(const SegmentCopy& segment, uint32_t first, uint32_t count) {
  return first <= segment.row_count && count <= segment.row_count - first;
}

}  // namespace wavekv::gpu
