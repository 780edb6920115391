// Data sets for outlier_study: keys with structure, without, and of a real model, with needles.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "bench/recorded_layers.h"
#include "storage/base/dtype.h"

namespace wavekv::bench {

// Tokens that stay exact, as in the engine.
inline constexpr uint32_t kFirstTokens = 4;
inline constexpr uint32_t kLocalTokens = 64;
// Attention mass of a needle for the weakest query head of its group.
inline constexpr double kNeedleMass = 0.9;

// One KV head's tokens and the questions asked of them.
struct Question {
  std::vector<float> queries;  // [group, dim]
  int64_t needle = -1;         // Token that holds the answer, or none.
};
struct DataSet {
  std::string name;
  uint32_t tokens = 0, dim = 0, group = 0;
  DType dtype = DType::kBF16;
  std::vector<float> keys, values;  // [tokens, dim]
  std::vector<Question> questions;
};

// log(sum of exp(x)).
double LogSumExp(const std::vector<double>& x);

// Keys of N(0, 1), or with `topics` a topic of N(0, 1) for every 4 tokens plus noise of 0.5, 256
// topics for 8,192 tokens. Groups of 4 query heads of length `query_length`, 80 % in common. 32
// questions with a needle and 32 without.
DataSet Synthetic(std::mt19937_64& random, bool topics, uint32_t tokens, double query_length);

// Keys, values and queries of one head of a real model. With one needle and its question, or with
// plain questions. (Consecutive queries of a text are alike: several needles would compete.)
DataSet Real(std::mt19937_64& random, const RecordedLayer& layer, uint32_t head, bool needle);

}  // namespace wavekv::bench
