// Exact attention over rows in memory that another process wrote: the client's half of the portable
// wave-buffer path. Pure functions over borrowed memory, internal to the SDK.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/staged_buffer.h"
#include "client/types.h"

namespace wavekv::client {

// Rows of one KV head: keys [count, key_dim] and values [count, value_dim] of the sequence's dtype.
struct RowSpan {
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  uint32_t count = 0;
};

// Internal when a row lies outside `region` or is not aligned to its element: a daemon is not
// trusted blindly, and another sequence's rows are nobody's business.
absl::Status CheckRows(const StagedRegion& region, const ModelShape& shape,
                       std::span<const StagedRows> staged);

// Turns offsets from a reply, which it checks, into pointers. `region` lies in `buffer`.
absl::StatusOr<std::vector<RowSpan>> ResolveRows(std::span<const std::byte> buffer,
                                                 const StagedRegion& region,
                                                 const ModelShape& shape,
                                                 std::span<const StagedRows> staged);

// Softmax attention of one group over all rows, in float32. queries [group_size, key_dim];
// out [group_size, value_dim] and lse [group_size] (natural log) are overwritten; without rows
// out = 0 and lse = -inf.
void AttendRows(const ModelShape& shape, const float* queries, std::span<const RowSpan> rows,
                float* out, float* lse);

// Merges another attention over other tokens into (out, lse) by log-sum-exp. out and other_out
// [heads, value_dim], lse and other_lse [heads]. An empty attention (lse = -inf) is the identity.
void MergeAttention(uint32_t heads, uint32_t value_dim, const float* other_out,
                    const float* other_lse, float* out, float* lse);

// The whole step: exact attention of queries [query_heads, key_dim], any dtype, over the rows that
// `query` staged, merged with its estimation zone. Internal when rows are missing.
absl::StatusOr<Attention> AttendBuffer(const ModelShape& shape, const Tensor& queries,
                                       std::span<const std::byte> buffer,
                                       const StagedRegion& region, const QueryResult& query);

}  // namespace wavekv::client
