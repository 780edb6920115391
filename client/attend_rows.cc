#include "client/attend_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

bool InRegion(uint64_t offset, uint64_t bytes, const StagedRegion& region, size_t alignment) {
  return offset >= region.offset && offset - region.offset <= region.bytes &&
         bytes <= region.bytes - (offset - region.offset) && offset % alignment == 0;
}

}  // namespace

absl::Status CheckRows(const StagedRegion& region, const ModelShape& shape,
                       std::span<const StagedRows> staged) {
  const size_t element = DTypeBytes(shape.dtype);
  for (const StagedRows& run : staged) {
    // 2^32 rows of at most 256 dimensions: no overflow in 64 bits.
    const uint64_t key_bytes = uint64_t{run.row_count} * shape.key_bytes();
    const uint64_t value_bytes = uint64_t{run.row_count} * shape.value_bytes();
    if (InRegion(run.key_offset, key_bytes, region, element) &&
        InRegion(run.value_offset, value_bytes, region, element)) {
      continue;
    }
    return absl::InternalError(
        absl::StrCat("the daemon staged ", run.row_count, " rows at key offset ", run.key_offset,
                     " and value offset ", run.value_offset, ", outside the sequence's region of ",
                     region.bytes, " bytes at ", region.offset, " or not aligned to ", element));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RowSpan>> ResolveRows(std::span<const std::byte> buffer,
                                                 const StagedRegion& region,
                                                 const ModelShape& shape,
                                                 std::span<const StagedRows> staged) {
  WAVEKV_RETURN_IF_ERROR(CheckRows(region, shape, staged));
  std::vector<RowSpan> rows;
  rows.reserve(staged.size());
  for (const StagedRows& run : staged) {
    rows.push_back({.keys = buffer.data() + run.key_offset,
                    .values = buffer.data() + run.value_offset,
                    .count = run.row_count});
  }
  return rows;
}

void AttendRows(const ModelShape& shape, const float* queries, std::span<const RowSpan> rows,
                float* out, float* lse) {
  const size_t group = shape.group_size();
  size_t row_count = 0;
  for (const RowSpan& run : rows) row_count += run.count;
  std::fill_n(out, group * shape.value_dim, 0.0f);
  std::fill_n(lse, group, kEmptyLse);
  if (row_count == 0) return;

  std::vector<float> logits(row_count * group);  // [rows, group]
  std::vector<float> row(std::max(shape.key_dim, shape.value_dim));
  size_t at = 0;
  for (const RowSpan& run : rows) {
    for (uint32_t i = 0; i < run.count; ++i, ++at) {
      ConvertToFloat(shape.dtype, run.keys + i * shape.key_bytes(), shape.key_dim, row.data());
      for (size_t head = 0; head < group; ++head) {
        const float* const query = queries + head * shape.key_dim;
        float dot = 0;
        for (uint32_t d = 0; d < shape.key_dim; ++d) dot += query[d] * row[d];
        logits[at * group + head] = shape.softmax_scale * dot;
        lse[head] = std::max(lse[head], logits[at * group + head]);
      }
    }
  }

  // lse holds the largest logit of each head from here until the sums are known.
  std::vector<float> sums(group, 0.0f);
  at = 0;
  for (const RowSpan& run : rows) {
    for (uint32_t i = 0; i < run.count; ++i, ++at) {
      ConvertToFloat(shape.dtype, run.values + i * shape.value_bytes(), shape.value_dim,
                     row.data());
      for (size_t head = 0; head < group; ++head) {
        const float weight = std::exp(logits[at * group + head] - lse[head]);
        sums[head] += weight;
        float* const target = out + head * shape.value_dim;
        for (uint32_t d = 0; d < shape.value_dim; ++d) target[d] += weight * row[d];
      }
    }
  }
  for (size_t head = 0; head < group; ++head) {
    float* const target = out + head * shape.value_dim;
    for (uint32_t d = 0; d < shape.value_dim; ++d) target[d] /= sums[head];
    lse[head] += std::log(sums[head]);
  }
}

void MergeAttention(uint32_t heads, uint32_t value_dim, const float* other_out,
                    const float* other_lse, float* out, float* lse) {
  for (uint32_t head = 0; head < heads; ++head) {
    if (other_lse[head] == kEmptyLse) continue;
    const float top = std::max(lse[head], other_lse[head]);
    const float mine = std::exp(lse[head] - top);
    const float theirs = std::exp(other_lse[head] - top);
    const float sum = mine + theirs;
    float* const target = out + size_t{head} * value_dim;
    const float* const source = other_out + size_t{head} * value_dim;
    for (uint32_t d = 0; d < value_dim; ++d) {
      target[d] = (mine * target[d] + theirs * source[d]) / sum;
    }
    lse[head] = top + std::log(sum);
  }
}

absl::StatusOr<Attention> AttendBuffer(const ModelShape& shape, const Tensor& queries,
                                       std::span<const std::byte> buffer,
                                       const StagedRegion& region, const QueryResult& query) {
  const size_t group = shape.group_size();
  std::vector<float> floats(size_t{shape.query_head_count} * shape.key_dim);
  ConvertToFloat(queries.dtype, queries.data, floats.size(), floats.data());
  Attention attention{.out = std::vector<float>(size_t{shape.query_head_count} * shape.value_dim),
                      .lse = std::vector<float>(shape.query_head_count),
                      .generation = query.generation,
                      .version = query.version,
                      .token_count = query.token_count,
                      .counters = query.counters};
  for (const HeadZones& head : query.heads) {
    uint64_t expected = head.steady_tokens;
    for (const ClusterRef& cluster : head.retrieved) expected += cluster.size;
    uint64_t found = 0;
    for (const StagedRows& run : head.staged) found += run.row_count;
    if (expected != found) {
      return absl::InternalError(absl::StrCat("KV head ", head.kv_head, ": the daemon staged ",
                                              found, " rows, expected ", expected,
                                              " of the steady zone and the retrieved clusters"));
    }
    WAVEKV_ASSIGN_OR_RETURN(const std::vector<RowSpan> rows,
                            ResolveRows(buffer, region, shape, head.staged));
    const size_t first_head = head.kv_head * group;
    AttendRows(shape, floats.data() + first_head * shape.key_dim, rows,
               attention.out.data() + first_head * shape.value_dim,
               attention.lse.data() + first_head);
  }
  MergeAttention(shape.query_head_count, shape.value_dim, query.estimation.out.data(),
                 query.estimation.lse.data(), attention.out.data(), attention.lse.data());
  return attention;
}

}  // namespace wavekv::client
