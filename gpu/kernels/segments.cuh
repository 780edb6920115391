// Segments as clusters name them. The names lie where a client can write.
#pragma once

#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

// How many segments of a head a step looks at.
__device__ inline uint32_t KnownSegments(const StepShape& shape, const HeadDescriptor& head) {
  return min(head.segment_count, shape.segment_capacity);
}

// The segment that a cluster names, one of `count`: another is taken for the last.
__device__ inline uint32_t KnownSegment(uint32_t number, uint32_t count) {
  return min(number, count - 1);
}
__device__ inline const SegmentCopy& SegmentOf(const HeadDescriptor& head, uint32_t number) {
  return head.segments[KnownSegment(number, head.segment_count)];
}

// Whether `count` rows from `first` lie in the segment.
__device__ inline bool HasRows(const SegmentCopy& segment, uint32_t first, uint32_t count) {
  return first <= segment.row_count && count <= segment.row_count - first;
}

}  // namespace wavekv::gpu
