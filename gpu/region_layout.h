// How a sequence's region is divided: a pure function of shape, length and options.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "gpu/buffer_stager.h"
#include "storage/base/model_shape.h"

namespace wavekv {

// Header page, block cache, staging area; offsets from the start of the region.
struct RegionLayout {
  uint32_t key_row_bytes = 0;
  uint32_t value_row_bytes = 0;
  uint32_t value_part_offset = 0;  // Of the value rows in a slot.
  uint32_t slot_bytes = 0;
  uint32_t slot_count = 0;
  uint64_t cache_offset = 0;
  uint64_t staging_offset = 0;
  uint64_t staging_bytes = 0;
  uint64_t region_bytes = 0;
};

// `options` are valid, `shape` too.
RegionLayout PlanRegion(const ModelShape& shape, uint64_t max_tokens,
                        const BufferStagerOptions& options);

// What `row_count` rows take in the staging area: the key rows, then the value rows.
uint64_t SpanBytes(const RegionLayout& layout, uint32_t row_count);

}  // namespace wavekv
