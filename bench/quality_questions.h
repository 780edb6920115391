// What quality_study asks of the index: rows of policies, each with the index it is asked of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/studied_head.h"
#include "index/backend/compute_backend.h"

namespace wavekv::bench {

// One point of a curve: an answer by `policy`, over many steps and heads.
struct Question {
  std::string question;  // The plot.
  std::string series;    // The curve.
  double setting = 0;    // Along the curve.
  Policy policy;
};

// An index, and what is asked of it. `segment_tokens` as in CutRules.
struct QuestionSet {
  uint64_t segment_tokens = 8192;
  ClusterOptions options;
  std::vector<Question> questions;
};

std::vector<QuestionSet> AllQuestions();

}  // namespace wavekv::bench
