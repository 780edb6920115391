#include "daemon/engine/tensor_rows.h"

#include <cstring>

namespace wavekv {

void TensorRows::Copy(size_t layer_idx, uint64_t token, uint32_t head, uint64_t count,
                      std::byte* target) const {
  const std::byte* source = Row(layer_idx, token, head);
  if (token_stride_ == row_bytes_) {
    std::memcpy(target, source, count * row_bytes_);
    return;
  }
  for (uint64_t i = 0; i < count; ++i) {
    std::memcpy(target + i * row_bytes_, source + i * token_stride_, row_bytes_);
  }
}

}  // namespace wavekv
