#include "tests/mock_decoder/exact_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace wavekv::mock {
namespace {

constexpr size_t kBlockRows = 32;
constexpr uint64_t kPieceRows = 128 * kBlockRows;
// Weights below the block's largest by this many nats do not change a f32 sum.
constexpr float kNegligible = 25.0f;

// Running softmax of one query over some rows.
struct Partial {
  double max = -std::numeric_limits<double>::infinity();
  double mass = 0;  // Sum of exp(logit - max).
  double logit_sum = 0;
  double logit_square_sum = 0;
  double rows = 0;
  double out[kHeadDim] = {};  // Sum of exp(logit - max) * value.
};

struct Block {
  float keys[kHeadDim][kBlockRows];  // Transposed: the loop over rows is the one that vectorises.
  float values[kBlockRows][kHeadDim];
};

void LoadBlock(const RowsView& rows, uint64_t first, size_t count, bool with_values, Block* block) {
  for (size_t row = 0; row < count; ++row) {
    float key[kHeadDim];
    const size_t offset = (first + row) * rows.stride_bytes;
    ConvertToFloat(rows.dtype, rows.keys + offset, kHeadDim, key);
    for (uint32_t d = 0; d < kHeadDim; ++d) block->keys[d][row] = key[d];
    if (with_values) {
      ConvertToFloat(rows.dtype, rows.values + offset, kHeadDim, block->values[row]);
    }
  }
}

void BlockLogits(const Block& block, const float* query, float* logits) {
  float sums[kBlockRows] = {};
  for (uint32_t d = 0; d < kHeadDim; ++d) {
    const float q = query[d];
    for (size_t row = 0; row < kBlockRows; ++row) sums[row] += q * block.keys[d][row];
  }
  for (size_t row = 0; row < kBlockRows; ++row) logits[row] = sums[row] * kSoftmaxScale;
}

void Merge(const Partial& other, Partial* total) {
  const double max = std::max(total->max, other.max);
  if (max == -std::numeric_limits<double>::infinity()) return;
  const double keep = std::exp(total->max - max);
  const double add = std::exp(other.max - max);
  total->max = max;
  total->mass = total->mass * keep + other.mass * add;
  total->logit_sum += other.logit_sum;
  total->logit_square_sum += other.logit_square_sum;
  total->rows += other.rows;
  for (uint32_t d = 0; d < kHeadDim; ++d) {
    total->out[d] = total->out[d] * keep + other.out[d] * add;
  }
}

void AddBlock(const Block& block, size_t count, const float* query, bool with_values,
              Partial* total) {
  float logits[kBlockRows];
  BlockLogits(block, query, logits);
  const float max = *std::max_element(logits, logits + count);
  float mass = 0;
  float sum = 0;
  float square_sum = 0;
  float out[kHeadDim] = {};
  for (size_t row = 0; row < count; ++row) {
    sum += logits[row];
    square_sum += logits[row] * logits[row];
    if (logits[row] < max - kNegligible) continue;
    const float weight = std::exp(logits[row] - max);
    mass += weight;
    if (!with_values) continue;
    for (uint32_t d = 0; d < kHeadDim; ++d) out[d] += weight * block.values[row][d];
  }
  Partial partial;
  partial.max = max;
  partial.mass = mass;
  partial.logit_sum = sum;
  partial.logit_square_sum = square_sum;
  partial.rows = static_cast<double>(count);
  for (uint32_t d = 0; d < kHeadDim; ++d) partial.out[d] = out[d];
  Merge(partial, total);
}

void AttendPiece(const RowsView& rows, std::span<const PrefixQuery> queries, bool with_values,
                 uint64_t first, uint64_t last, Partial* partials) {
  Block block = {};
  for (uint64_t row = first; row < last; row += kBlockRows) {
    const size_t loaded = std::min<uint64_t>(kBlockRows, last - row);
    LoadBlock(rows, row, loaded, with_values, &block);
    for (size_t q = 0; q < queries.size(); ++q) {
      if (queries[q].token_count <= row) continue;
      const size_t count = std::min<uint64_t>(loaded, queries[q].token_count - row);
      AddBlock(block, count, queries[q].query, with_values, &partials[q]);
    }
  }
}

}  // namespace

std::vector<ExactResult> AttendExactly(const RowsView& rows, std::span<const PrefixQuery> queries,
                                       bool with_values, ThreadPool* pool) {
  uint64_t row_count = 0;
  for (const PrefixQuery& query : queries) row_count = std::max(row_count, query.token_count);
  const size_t pieces = (row_count + kPieceRows - 1) / kPieceRows;
  std::vector<Partial> partials(pieces * queries.size());
  pool->ParallelFor(pieces, [&](size_t piece) {
    const uint64_t first = piece * kPieceRows;
    AttendPiece(rows, queries, with_values, first, std::min(first + kPieceRows, row_count),
                partials.data() + piece * queries.size());
  });
  std::vector<ExactResult> results(queries.size());
  for (size_t q = 0; q < queries.size(); ++q) {
    Partial total;
    for (size_t piece = 0; piece < pieces; ++piece) {
      Merge(partials[piece * queries.size() + q], &total);
    }
    ExactResult& result = results[q];
    result.lse = total.max + std::log(total.mass);
    result.logit_mean = total.logit_sum / total.rows;
    result.logit_var = total.logit_square_sum / total.rows - result.logit_mean * result.logit_mean;
    for (uint32_t d = 0; d < kHeadDim; ++d) result.out[d] = total.out[d] / total.mass;
  }
  return results;
}

}  // namespace wavekv::mock
