// A segment's index as it lies on the device.
#pragma once

#include <cstdint>
#include <vector>

#include "gpu/buffer_memory.h"
#include "gpu/resident/resident_layout.h"
#include "index/backend/resident.h"

namespace wavekv::resident {

// The numbers that a segment has in its unit, from the version that brings it to the last one that
// has it.
struct SegmentNumbers {
  uint32_t entry = 0;
  uint32_t first_cluster = 0;  // Multiple of gpu::kClusterPad.
  uint32_t cluster_count = 0;  // Padding counted.
  uint32_t first_block = 0;
  uint32_t block_count = 0;
};

// The arrays of one segment, clusters padded to a multiple of gpu::kClusterPad: the same numbers
// as the head's (docs/decisions/010-gpu-step.md, "Index copy"), none of them rounded again.
struct IndexCopy {
  // `segment` has key_dim = value_dim and fits `numbers`.
  IndexCopy(const ResidentSegment& segment, const SegmentNumbers& numbers);

  // Where its bytes go, into a unit that begins at `unit_offset` of the buffer. They are borrowed.
  void AppendCopies(const UnitLayout& layout, uint64_t unit_offset,
                    std::vector<ByteCopy>* copies) const;

  SegmentNumbers numbers;
  SegmentEntry entry = {};
  std::vector<float> means;            // [3, dim] key mean, value mean, shares of the key spread
  std::vector<int8_t> centroids;       // [cluster_count, dim]
  std::vector<int8_t> value_means;     // [cluster_count, dim]
  std::vector<float> centroid_scales;  // [cluster_count], as all that follow but the last
  std::vector<float> value_scales;
  std::vector<float> key_spreads;
  std::vector<float> value_spreads;
  std::vector<uint16_t> cluster_segment;
  std::vector<uint32_t> first_row;
  std::vector<uint32_t> first_block;
  std::vector<int32_t> block_slots;  // [block_count] all -1
};

}  // namespace wavekv::resident
