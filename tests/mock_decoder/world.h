// A context with planted needles, and the questions asked about it.
//
// A fact is hidden at a position of the prefill (planting.h) and asked for by one decode step: the
// i-th token after the prefill asks for the i-th fact. Its answer is spread over every layer and KV
// head, so that all of them must find it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/base/thread_pool.h"
#include "tests/mock_decoder/context.h"
#include "tests/mock_decoder/exact_attention.h"
#include "tests/mock_decoder/model.h"
#include "tests/mock_decoder/planting.h"

namespace wavekv::mock {

// The zones of the daemon's defaults, which decide where needles are most at risk.
inline constexpr uint64_t kFirstTokens = 4;
inline constexpr uint64_t kLocalTokens = 64;
inline constexpr uint64_t kSegmentTokens = 8192;
inline constexpr uint64_t kSmallSegmentTokens = 1024;

struct WorldConfig {
  ModelConfig model;
  uint64_t token_count = 4096;  // Of the prefill.
  uint32_t needle_count = 32;
};

// InvalidArgument that names the field, what was found and what is allowed.
absl::Status ValidateWorldConfig(const WorldConfig& config);

// Distinct positions, as many as asked for: the first and last tokens, both sides of segment
// boundaries, the rest anywhere between, by seed. In no order.
std::vector<uint64_t> NeedlePositions(uint64_t token_count, uint32_t needle_count, uint64_t seed);

// The first position that stays exact at the end of a sequence of `token_count` tokens whose index
// was built then: the local window, and a rest too short for a segment of its own.
uint64_t SteadyTailStart(uint64_t token_count);

// What attention returned for one asking step: [layers, query_heads, kHeadDim].
using StepOutput = std::vector<float>;

struct ExactAnswers {
  std::vector<StepOutput> outputs;  // One per fact, in asking order.
  double needle_mass_min = 0;       // Over facts, layers and query heads.
  double needle_mass_max = 0;
  double logit_std = 0;  // Of one query over the context, root mean square.
};

// Immutable once created; reading is thread-safe.
class World {
 public:
  // `pool` is used during the call.
  static absl::StatusOr<std::unique_ptr<World>> Create(const WorldConfig& config, ThreadPool* pool);

  const WorldConfig& config() const { return config_; }
  const Model& model() const { return model_; }
  // The prefill, then the question token of each fact in asking order.
  const Context& context() const { return context_; }
  // In asking order; fact i is asked by the token at token_count + i.
  const std::vector<Fact>& facts() const { return facts_; }

  // [query_heads, kHeadDim], rounded to the model's dtype.
  std::vector<float> Queries(uint32_t layer, uint32_t fact_idx) const;
  // Likewise, in the model's dtype.
  std::vector<std::byte> QueryBytes(uint32_t layer, uint32_t fact_idx) const;

  // Attention over every token for every fact's step.
  ExactAnswers AnswerExactly(ThreadPool* pool) const;

 private:
  World(const WorldConfig& config, ThreadPool* pool);
  std::vector<uint32_t> Tokens() const;
  // [facts, group, kHeadDim] of one (layer, KV head).
  std::vector<float> GroupQueries(uint32_t layer, uint32_t kv_head) const;
  void AnswerHead(uint32_t layer, uint32_t kv_head, ThreadPool* pool, ExactAnswers* answers) const;

  const WorldConfig config_;
  const Model model_;
  const std::vector<Fact> facts_;
  Context context_;
};

}  // namespace wavekv::mock
