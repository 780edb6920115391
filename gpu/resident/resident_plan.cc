#include "gpu/resident/resident_plan.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "gpu/buffer_layout.h"
#include "storage/base/dtype.h"
#include "storage/base/status_macros.h"

namespace wavekv::resident {
namespace {

constexpr uint64_t kSegmentsBeside = 12;    // Those that are replaced, and of the next version.
constexpr uint64_t kClustersMax = 389'120;  // That the step's selection holds.
constexpr uint32_t kRingAlignRows = 256;
constexpr uint32_t kRingRowsMax = 1u << 20;
// Steps whose uses the log holds, and the clusters that a step may be expected to retrieve: a
// count, and a share of all.
constexpr uint64_t kLogSteps = 4;
constexpr uint64_t kRetrievedCount = 256;
constexpr uint64_t kRetrievedShare = 64;

absl::Status Refuse(absl::string_view what, uint64_t found, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(
      "a step on the GPU cannot attend over this: ", what, " is ", found, ", allowed: ", allowed));
}

absl::Status CheckShape(const ModelShape& shape) {
  WAVEKV_RETURN_IF_ERROR(ValidateModelShape(shape));
  if (shape.dtype == DType::kF32) {
    return absl::InvalidArgumentError(
        "a step on the GPU cannot attend over this: dtype is f32, allowed: bf16, f16");
  }
  if (shape.key_dim != 64 && shape.key_dim != 128 && shape.key_dim != 256) {
    return Refuse("key_dim", shape.key_dim, "64, 128, 256");
  }
  if (shape.value_dim != shape.key_dim) {
    return Refuse("value_dim", shape.value_dim, absl::StrCat("key_dim, ", shape.key_dim));
  }
  if (shape.group_size() > gpu::kGroupMax) {
    return Refuse("query heads of a KV head", shape.group_size(),
                  absl::StrCat("1 to ", gpu::kGroupMax));
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const ResidentOptions& options) {
  if (options.segment_tokens == 0 || options.small_segment_tokens == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("segment_tokens is ", options.segment_tokens, " and small_segment_tokens ",
                     options.small_segment_tokens, ", allowed: at least 1"));
  }
  if (!(options.cache_ratio >= 0 && options.cache_ratio <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache_ratio is ", options.cache_ratio, ", allowed: 0 to 1"));
  }
  if (options.ring_rows == 0 || options.ring_rows > kRingRowsMax ||
      options.ring_rows % kRingAlignRows != 0) {
    return absl::InvalidArgumentError(absl::StrCat("ring_rows is ", options.ring_rows,
                                                   ", allowed: multiples of ", kRingAlignRows,
                                                   " up to ", kRingRowsMax));
  }
  return absl::OkStatus();
}

constexpr uint64_t ClustersOf(uint64_t tokens) { return tokens / 10 + 1; }

// Fills what is counted; `max_tokens` is bounded.
UnitLayout CountUnit(uint64_t max_tokens, const ResidentOptions& options) {
  // Beside the index: the segments of a version that is replaced and of the next.
  const uint64_t tokens = max_tokens + 2 * options.segment_tokens;
  const uint64_t segments = max_tokens / options.segment_tokens +
                            options.segment_tokens / options.small_segment_tokens + kSegmentsBeside;
  UnitLayout unit = {};
  unit.segment_capacity = static_cast<uint32_t>(segments);
  unit.cluster_capacity = static_cast<uint32_t>(
      AlignUp(ClustersOf(tokens) + segments * gpu::kClusterPad, gpu::kClusterPad));
  unit.block_capacity = static_cast<uint32_t>(tokens / gpu::kBlockRows + 1) + unit.cluster_capacity;
  unit.ring_rows = options.ring_rows;
  const double cached_blocks =
      options.cache_ratio * static_cast<double>(max_tokens) / gpu::kBlockRows;
  unit.slot_count = std::max(1u, static_cast<uint32_t>(std::llround(cached_blocks)));
  const uint64_t retrieved = kRetrievedCount + unit.cluster_capacity / kRetrievedShare;
  unit.log_capacity =
      static_cast<uint32_t>(std::bit_ceil(kLogSteps * gpu::kClusterBlocksMax * retrieved));
  return unit;
}

// Lays the arrays out one after another.
void PlaceArrays(uint64_t dim, UnitLayout* unit) {
  constexpr uint64_t kElementBytes = 2;
  const uint64_t clusters = unit->cluster_capacity, segments = unit->segment_capacity;
  auto take = [at = uint64_t{0}](uint64_t bytes) mutable {
    const uint64_t begin = at;
    at = AlignUp(at + bytes, kAlignBytes);
    return begin;
  };
  unit->published_offset = take(kAreas * sizeof(PublishedHead));
  unit->sizes_offset = take(kAreas * clusters * sizeof(uint16_t));
  unit->segments_offset = take(segments * sizeof(SegmentEntry));
  unit->means_offset = take(segments * 3 * dim * sizeof(float));
  unit->centroids_offset = take(clusters * dim);
  unit->value_means_offset = take(clusters * dim);
  unit->centroid_scales_offset = take(clusters * sizeof(float));
  unit->value_scales_offset = take(clusters * sizeof(float));
  unit->key_spreads_offset = take(clusters * sizeof(float));
  unit->value_spreads_offset = take(clusters * sizeof(float));
  unit->cluster_segment_offset = take(clusters * sizeof(uint16_t));
  unit->first_row_offset = take(clusters * sizeof(uint32_t));
  unit->first_block_offset = take(clusters * sizeof(uint32_t));
  unit->block_slots_offset = take(unit->block_capacity * sizeof(int32_t));
  unit->sink_offset = take(2 * kSinkRows * dim * kElementBytes);
  unit->ring_offset = take(2 * unit->ring_rows * dim * kElementBytes);
  unit->slots_offset = take(unit->slot_count * 2 * gpu::kBlockRows * dim * kElementBytes);
  unit->free_slots_offset = take(unit->slot_count * sizeof(gpu::FreeSlot));
  unit->log_offset = take(unit->log_capacity * sizeof(gpu::BlockUse));
  unit->unit_bytes = AlignUp(take(0), kBufferPageBytes);
}

}  // namespace

absl::StatusOr<ResidentHeader> PlanResident(const ModelShape& shape, uint64_t max_tokens,
                                            const ResidentOptions& options) {
  WAVEKV_RETURN_IF_ERROR(CheckShape(shape));
  WAVEKV_RETURN_IF_ERROR(CheckOptions(options));
  // So many that a unit's arrays, of which none has more than 2^11 bytes for a token, and all
  // units, at most 2^20, stay far below 2^64 bytes.
  constexpr uint64_t kTokensMax = kClustersMax * 10;
  const UnitLayout counts = CountUnit(std::min(max_tokens, kTokensMax), options);
  if (max_tokens == 0 || max_tokens > kTokensMax || counts.cluster_capacity > kClustersMax) {
    return Refuse("max_tokens", max_tokens, absl::StrCat("1 to about ", kTokensMax * 9 / 10));
  }
  ResidentHeader header = {};
  header.magic = kResidentMagic;
  header.version = kResidentVersion;
  header.element =
      static_cast<uint32_t>(shape.dtype == DType::kBF16 ? gpu::Element::kBF16 : gpu::Element::kF16);
  header.layer_count = shape.layer_count;
  header.kv_head_count = shape.kv_head_count;
  header.head_dim = shape.key_dim;
  header.unit = counts;
  PlaceArrays(shape.key_dim, &header.unit);
  const uint64_t units = uint64_t{shape.layer_count} * shape.kv_head_count;
  header.states_offset = kBufferPageBytes;
  header.units_offset =
      AlignUp(header.states_offset + units * sizeof(gpu::HeadState), kBufferPageBytes);
  header.region_bytes = header.units_offset + units * header.unit.unit_bytes;
  return header;
}

}  // namespace wavekv::resident
