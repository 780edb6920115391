#include "tests/gpu/kernels/region_writer.h"

#include <algorithm>
#include <cstring>

namespace wavekv::gpu {
namespace {

using resident::PublishedHead;
using resident::ResidentHeader;
using resident::SegmentEntry;
using resident::UnitLayout;

constexpr uint64_t kStatesOffset = 4096;
constexpr uint32_t kWindows = 2;

uint64_t Align(uint64_t offset) {
  return (offset + resident::kAlignBytes - 1) / resident::kAlignBytes * resident::kAlignBytes;
}

// Room for the largest of the heads, and a little more.
UnitLayout LayOut(std::span<const HeadProblem> heads, uint32_t slot_count) {
  UnitLayout unit = {};
  for (const HeadProblem& head : heads) {
    unit.cluster_capacity = std::max(unit.cluster_capacity, head.cluster_count());
    unit.segment_capacity =
        std::max(unit.segment_capacity, static_cast<uint32_t>(head.segments.size()));
    unit.block_capacity = std::max(unit.block_capacity, head.block_count);
  }
  unit.cluster_capacity += kClusterPad;
  unit.segment_capacity += 1;
  unit.block_capacity += 1;
  unit.ring_rows = heads[0].spec.steady_capacity;
  unit.slot_count = slot_count;
  unit.log_capacity = 4 * unit.block_capacity;
  const uint64_t clusters = unit.cluster_capacity, dim = heads[0].dim;
  uint64_t end = 0;
  const auto place = [&](uint64_t* offset, uint64_t bytes) {
    *offset = end;
    end = Align(end + bytes);
  };
  place(&unit.published_offset, resident::kAreas * sizeof(PublishedHead));
  place(&unit.sizes_offset, resident::kAreas * clusters * sizeof(uint16_t));
  place(&unit.segments_offset, unit.segment_capacity * sizeof(SegmentEntry));
  place(&unit.means_offset, unit.segment_capacity * 3 * dim * sizeof(float));
  place(&unit.centroids_offset, clusters * dim);
  place(&unit.value_means_offset, clusters * dim);
  for (uint64_t* offset :
       {&unit.centroid_scales_offset, &unit.value_scales_offset, &unit.key_spreads_offset,
        &unit.value_spreads_offset, &unit.first_row_offset, &unit.first_block_offset}) {
    place(offset, clusters * 4);
  }
  place(&unit.cluster_segment_offset, clusters * sizeof(uint16_t));
  place(&unit.block_slots_offset, unit.block_capacity * sizeof(int32_t));
  place(&unit.sink_offset, 2 * resident::kSinkRows * dim * 2);
  place(&unit.ring_offset, 2 * uint64_t{unit.ring_rows} * dim * 2);
  place(&unit.slots_offset, uint64_t{slot_count} * 2 * kBlockRows * dim * 2);
  place(&unit.free_slots_offset, slot_count * sizeof(FreeSlot));
  place(&unit.log_offset, unit.log_capacity * sizeof(BlockUse));
  unit.unit_bytes = end;
  return unit;
}

}  // namespace

RegionImage::RegionImage(std::mt19937_64& random, const RegionSpec& spec,
                         std::span<const HeadProblem> heads) {
  const auto units = static_cast<uint32_t>(heads.size());
  ResidentHeader header = {};
  header.magic = resident::kResidentMagic;
  header.version = resident::kResidentVersion;
  header.element = static_cast<uint32_t>(heads[0].element);
  header.sequence_id = spec.sequence_id;
  header.layer_count = spec.layer_count;
  header.kv_head_count = spec.kv_head_count;
  header.head_dim = heads[0].dim;
  header.states_offset = kStatesOffset;
  header.units_offset = Align(kStatesOffset + units * sizeof(HeadState));
  header.unit = LayOut(heads, spec.slot_count);
  header.region_bytes = header.units_offset + units * header.unit.unit_bytes;
  header.state = resident::kRegionOpen;
  memory_.resize((header.region_bytes + resident::kAlignBytes) / sizeof(uint64_t));
  const auto address = reinterpret_cast<uintptr_t>(memory_.data());
  shift_ = Align(address) - address;
  // Of bytes below 0x40 any two make a finite 16-bit float, and any four a finite float.
  for (uint64_t& word : memory_) word = random() & 0x3f3f3f3f3f3f3f3f;
  this->header() = header;
  windows_.resize(kWindows);
  for (uint32_t unit = 0; unit < units; ++unit) WriteUnit(random, heads[unit], unit);
}

uint64_t RegionImage::UnitOffset(uint32_t unit) {
  return header().units_offset + unit * header().unit.unit_bytes;
}

PublishedHead& RegionImage::published(uint32_t unit) {
  const uint64_t area = state(unit).published % resident::kAreas;
  return At<PublishedHead>(UnitOffset(unit) + header().unit.published_offset)[area];
}

SegmentEntry* RegionImage::segments(uint32_t unit) {
  return At<SegmentEntry>(UnitOffset(unit) + header().unit.segments_offset);
}

void RegionImage::WriteSegments(const HeadProblem& head, uint32_t unit) {
  const UnitLayout& layout = header().unit;
  for (uint32_t i = 0; i < layout.segment_capacity; ++i) segments(unit)[i] = {};
  float* mean = At<float>(UnitOffset(unit) + layout.means_offset);
  for (size_t i = 0; i < head.segments.size(); ++i) {
    const SegmentArrays& segment = head.segments[i];
    for (const auto* floats : {&segment.key_mean, &segment.value_mean, &segment.spread_share}) {
      mean = std::copy(floats->begin(), floats->end(), mean);
    }
    if (segment.keys.empty()) continue;
    SegmentEntry& entry = segments(unit)[i];
    entry.window = static_cast<uint32_t>((unit + i) % kWindows);
    entry.token_count = static_cast<uint32_t>(segment.keys.size() / head.dim);
    std::vector<uint16_t>& window = windows_[entry.window];
    entry.keys_offset = window.size() * sizeof(uint16_t);
    window.insert(window.end(), segment.keys.begin(), segment.keys.end());
    entry.values_offset = window.size() * sizeof(uint16_t);
    window.insert(window.end(), segment.values.begin(), segment.values.end());
  }
}

void RegionImage::WriteUnit(std::mt19937_64& random, const HeadProblem& head, uint32_t unit) {
  const UnitLayout& layout = header().unit;
  const uint64_t base = UnitOffset(unit);
  const auto write = [&](uint64_t offset, const auto& array) {
    std::copy(array.begin(), array.end(),
              At<typename std::decay_t<decltype(array)>::value_type>(base + offset));
  };
  HeadState& state = this->state(unit) = {};
  state.published = 3;
  state.appended = head.spec.steady_first + head.spec.steady;
  state.started = state.completed_epoch = random() % 1000;
  state.free_tail = layout.slot_count;
  PublishedHead& published = this->published(unit) = {};
  published.version = 3;
  published.steady_first = head.spec.steady_first;
  published.cluster_count = head.cluster_count();
  published.segment_count = static_cast<uint32_t>(head.segments.size());
  published.retrieve_count = std::min(head.spec.retrieve, head.real_clusters);
  published.sink_count = head.spec.sinks;
  for (uint32_t c = 0; c < head.cluster_count(); ++c) {
    if (head.sizes[c] == 0) continue;
    published.value_scale_max = std::max(published.value_scale_max, head.value_scales[c]);
  }
  WriteSegments(head, unit);
  write(layout.sizes_offset + layout.cluster_capacity * sizeof(uint16_t), head.sizes);
  write(layout.centroids_offset, head.centroids);
  write(layout.value_means_offset, head.value_means);
  write(layout.centroid_scales_offset, head.centroid_scales);
  write(layout.value_scales_offset, head.value_scales);
  write(layout.key_spreads_offset, head.key_spreads);
  write(layout.value_spreads_offset, head.value_spreads);
  write(layout.cluster_segment_offset, head.cluster_segment);
  write(layout.first_row_offset, head.first_row);
  write(layout.first_block_offset, head.first_block);
  write(layout.block_slots_offset, std::vector<int32_t>(layout.block_capacity, -1));
  write(layout.sink_offset, head.sink_keys);
  write(layout.sink_offset + uint64_t{2} * resident::kSinkRows * head.dim, head.sink_values);
  write(layout.ring_offset, head.steady_keys);
  write(layout.ring_offset + uint64_t{2} * layout.ring_rows * head.dim, head.steady_values);
  std::vector<FreeSlot> free_slots(layout.slot_count);
  for (uint32_t i = 0; i < layout.slot_count; ++i) free_slots[i] = {i, kNoBlock};
  std::shuffle(free_slots.begin(), free_slots.end(), random);
  write(layout.free_slots_offset, free_slots);
}

}  // namespace wavekv::gpu
