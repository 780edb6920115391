// Rows of K or V inside a tensor from outside, whichever its layout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "daemon/engine/cut_plan.h"
#include "daemon/engine/types.h"

namespace wavekv {

// Addresses row (layer index, token, head) of a validated tensor. Borrows its data.
class TensorRows {
 public:
  TensorRows() = default;
  TensorRows(const std::byte* data, Layout layout, uint64_t token_count, uint32_t head_count,
             size_t row_bytes)
      : data_(data),
        row_bytes_(row_bytes),
        token_stride_(layout == Layout::kNHD ? head_count * row_bytes : row_bytes),
        head_stride_(layout == Layout::kNHD ? row_bytes : token_count * row_bytes),
        layer_stride_(token_count * head_count * row_bytes) {}

  const std::byte* Row(size_t layer_idx, uint64_t token, uint32_t head) const {
    return data_ + layer_idx * layer_stride_ + token * token_stride_ + head * head_stride_;
  }
  // Copies `count` rows of one head from `token` on to contiguous memory.
  void Copy(size_t layer_idx, uint64_t token, uint32_t head, uint64_t count,
            std::byte* target) const;

 private:
  const std::byte* data_ = nullptr;
  size_t row_bytes_ = 0;
  size_t token_stride_ = 0;
  size_t head_stride_ = 0;
  size_t layer_stride_ = 0;
};

// K and V of consecutive positions of several layers, validated but for what depends on the
// sequence's state. The rows may lie in memory that a client shares and still writes: what has been
// read of them once need not be there the next time.
struct RowBatch {
  TokenRange range;
  std::vector<uint32_t> layers;
  TensorRows keys;
  TensorRows values;
  bool finite = false;  // Nobody writes them, and they hold no NaN and no infinity.
};

}  // namespace wavekv
