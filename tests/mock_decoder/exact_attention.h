// The mock decoder's own attention over every token: the truth the rest is compared with.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "storage/base/thread_pool.h"
#include "tests/mock_decoder/context.h"
#include "tests/mock_decoder/model.h"

namespace wavekv::mock {

// One query head's query over the first `token_count` rows.
struct PrefixQuery {
  const float* query = nullptr;  // [kHeadDim]
  uint64_t token_count = 0;
};

struct ExactResult {
  double lse = 0;         // Natural log of sum exp(kSoftmaxScale q.k).
  double logit_mean = 0;  // Of the logits, unweighted.
  double logit_var = 0;
  double out[kHeadDim] = {};  // Weighted mean of the values; zero unless asked for.
};

// Attends with many queries to one (layer, KV head) in one pass over its rows, in f32 within a
// block of rows and f64 across blocks. Spread over the pool in fixed pieces that are merged in
// order: the result does not depend on the number of threads.
std::vector<ExactResult> AttendExactly(const RowsView& rows, std::span<const PrefixQuery> queries,
                                       bool with_values, ThreadPool* pool);

}  // namespace wavekv::mock
