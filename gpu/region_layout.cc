#include "gpu/region_layout.h"

#include <algorithm>

#include "gpu/buffer_layout.h"
#include "index/segment.h"

namespace wavekv {

uint64_t SpanBytes(const RegionLayout& layout, uint32_t row_count) {
  return AlignUp(uint64_t{row_count} * layout.key_row_bytes, kRowAlignBytes) +
         AlignUp(uint64_t{row_count} * layout.value_row_bytes, kRowAlignBytes);
}

RegionLayout PlanRegion(const ModelShape& shape, uint64_t max_tokens,
                        const BufferStagerOptions& options) {
  RegionLayout layout;
  layout.key_row_bytes = static_cast<uint32_t>(shape.key_bytes());
  layout.value_row_bytes = static_cast<uint32_t>(shape.value_bytes());
  layout.value_part_offset =
      static_cast<uint32_t>(AlignUp(uint64_t{kBlockTokens} * layout.key_row_bytes, kRowAlignBytes));
  layout.slot_bytes = static_cast<uint32_t>(SpanBytes(layout, kBlockTokens));

  const uint64_t payload_bytes = max_tokens * shape.layer_count * shape.token_bytes();
  const auto share =
      static_cast<uint64_t>(options.cache_ratio * static_cast<double>(payload_bytes));
  const uint64_t most =
      options.cache_bytes_max != 0 ? options.cache_bytes_max : options.tenant_buffer_bytes / 4;
  const uint64_t cache_bytes = std::max(std::min(share, most), options.cache_bytes_min);
  layout.slot_count = static_cast<uint32_t>(std::max<uint64_t>(cache_bytes / layout.slot_bytes, 1));
  layout.cache_offset = kBufferPageBytes;
  layout.staging_offset = AlignUp(
      layout.cache_offset + uint64_t{layout.slot_count} * layout.slot_bytes, kBufferPageBytes);

  // Twice the sequence: room for one step while the one before is still being read.
  const uint64_t tokens = std::min<uint64_t>(options.staging_tokens, 2 * max_tokens);
  layout.staging_bytes = AlignUp(
      std::max<uint64_t>(tokens, 1) * shape.kv_head_count * SpanBytes(layout, 1), kBufferPageBytes);
  layout.region_bytes = layout.staging_offset + layout.staging_bytes;
  return layout;
}

}  // namespace wavekv
