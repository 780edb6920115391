// One KV head's tokens with their index, as the engine cuts and builds them after a prefill.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "index/backend/compute_backend.h"

namespace wavekv::bench {

// The first tokens, a window at the end, segments between. Movable; not copyable, since the index
// points into it.
struct BuiltHead {
  BuiltHead() = default;
  BuiltHead(BuiltHead&&) = default;
  BuiltHead& operator=(BuiltHead&&) = default;

  std::vector<std::byte> keys, values;  // Sorted by cluster; the steady rows in their place.
  std::vector<SegmentHead> segments;
  std::vector<const SegmentHead*> index;
  std::vector<RowRun> steady;
};

inline constexpr uint32_t kSinkTokens = 4;
inline constexpr uint32_t kWindowTokens = 64;

// `keys` and `values` [tokens, dim] of two-byte numbers, more of them than the steady zone takes.
BuiltHead BuildHead(ComputeBackend& backend, std::span<const std::byte> keys,
                    std::span<const std::byte> values, uint32_t dim, DType dtype);

}  // namespace wavekv::bench
