// A resident region as the daemon writes it (gpu/resident/resident_layout.h), in host memory, from
// random heads: for tests of whoever reads one.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "gpu/kernels/step_layout.h"
#include "gpu/resident/resident_layout.h"
#include "tests/gpu/kernels/head_problem.h"

namespace wavekv::gpu {

struct RegionSpec {
  uint64_t sequence_id = 1;
  uint32_t layer_count = 1;
  uint32_t kv_head_count = 1;
  uint32_t slot_count = 64;  // All on offer, none of them filled.
};

// Memory that is written by its byte offset, aligned as arrays are.
class RegionImage {
 public:
  // `heads` [layer_count * kv_head_count], all of one element, dim and steady capacity. Their rows
  // go into two windows in turn, segment by segment. Published is area 1; area 0 has sizes that no
  // step may look at. The rest of every array is rubbish, but finite.
  RegionImage(std::mt19937_64& random, const RegionSpec& spec, std::span<const HeadProblem> heads);

  std::span<uint8_t> bytes() {
    return {reinterpret_cast<uint8_t*>(memory_.data()) + shift_, header().region_bytes};
  }
  std::vector<std::vector<uint16_t>>& windows() { return windows_; }
  resident::ResidentHeader& header() { return *At<resident::ResidentHeader>(0); }
  HeadState& state(uint32_t unit) {
    return At<HeadState>(At<resident::ResidentHeader>(0)->states_offset)[unit];
  }
  // Of the current area.
  resident::PublishedHead& published(uint32_t unit);
  resident::SegmentEntry* segments(uint32_t unit);
  // Offset of a unit from the start of the region.
  uint64_t UnitOffset(uint32_t unit);

 private:
  template <typename T>
  T* At(uint64_t offset) {
    return reinterpret_cast<T*>(reinterpret_cast<char*>(memory_.data()) + shift_ + offset);
  }
  void WriteUnit(std::mt19937_64& random, const HeadProblem& head, uint32_t unit);
  void WriteSegments(const HeadProblem& head, uint32_t unit);

  std::vector<uint64_t> memory_;
  size_t shift_ = 0;
  std::vector<std::vector<uint16_t>> windows_;
};

}  // namespace wavekv::gpu
