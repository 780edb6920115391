#include "bench/built_head.h"

#include <algorithm>

#include "bench/or_die.h"

namespace wavekv::bench {

BuiltHead BuildHead(ComputeBackend& backend, std::span<const std::byte> keys,
                    std::span<const std::byte> values, uint32_t dim, DType dtype) {
  constexpr uint32_t kSegmentTokens = 8192;
  const size_t row = size_t{dim} * 2;
  BuiltHead head;
  head.keys.assign(keys.begin(), keys.end());
  head.values.assign(values.begin(), values.end());
  head.steady.push_back({head.keys.data(), head.values.data(), kSinkTokens});
  const uint32_t end = static_cast<uint32_t>(keys.size() / row) - kWindowTokens;
  for (uint32_t first = kSinkTokens; first < end;) {
    const uint32_t next = std::min(end, (first / kSegmentTokens + 1) * kSegmentTokens);
    const ClusterInput input = {first,
                                next - first,
                                dim,
                                dim,
                                dtype,
                                keys.data() + first * row,
                                values.data() + first * row};
    head.segments.push_back(
        OrDie(backend.ClusterSegment(input, ClusterOptions{}, head.keys.data() + first * row,
                                     head.values.data() + first * row)));
    first = next;
  }
  for (const SegmentHead& segment : head.segments) head.index.push_back(&segment);
  head.steady.push_back(
      {head.keys.data() + end * row, head.values.data() + end * row, kWindowTokens});
  return head;
}

}  // namespace wavekv::bench
