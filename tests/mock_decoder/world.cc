#include "tests/mock_decoder/world.h"

#include <algorithm>
#include <cmath>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"
#include "tests/mock_decoder/counter_random.h"
#include "tests/mock_decoder/exact_attention.h"

namespace wavekv::mock {
namespace {

constexpr uint64_t kTokensMin = 256;
constexpr uint64_t kTokensMax = 1ull << 24;
constexpr uint64_t kTokensPerNeedleMin = 16;
constexpr uint32_t kLayersMin = 4;

enum Stream : uint64_t { kPositionStream = 101, kOrderStream, kAnswerStream };

std::vector<Fact> PlanFacts(const WorldConfig& config) {
  const uint64_t seed = config.model.seed;
  std::vector<uint64_t> positions = NeedlePositions(config.token_count, config.needle_count, seed);
  const uint64_t order = StreamKey({seed, kOrderStream});
  for (size_t i = positions.size(); i > 1; --i) {
    std::swap(positions[i - 1], positions[UniformAt(order, i, static_cast<uint32_t>(i))]);
  }
  std::vector<Fact> facts;
  for (size_t i = 0; i < positions.size(); ++i) {
    const uint64_t answer = UniformAt(StreamKey({seed, kAnswerStream}), i, kVocabularySize);
    facts.push_back({positions[i], config.token_count + i, static_cast<uint32_t>(answer)});
  }
  return facts;
}

}  // namespace

absl::Status ValidateWorldConfig(const WorldConfig& config) {
  if (config.model.layer_count < kLayersMin || config.model.layer_count > 64) {
    return absl::InvalidArgumentError(absl::StrCat("layers: found ", config.model.layer_count,
                                                   ", allowed ", kLayersMin, " to 64"));
  }
  if (config.token_count < kTokensMin || config.token_count > kTokensMax) {
    return absl::InvalidArgumentError(absl::StrCat("tokens: found ", config.token_count,
                                                   ", allowed ", kTokensMin, " to ", kTokensMax));
  }
  if (config.needle_count < 1 || config.needle_count * kTokensPerNeedleMin > config.token_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("needles: found ", config.needle_count, ", allowed 1 to tokens / ",
                     kTokensPerNeedleMin, " = ", config.token_count / kTokensPerNeedleMin));
  }
  return absl::OkStatus();
}

std::vector<uint64_t> NeedlePositions(uint64_t token_count, uint32_t needle_count, uint64_t seed) {
  const uint64_t key = StreamKey({seed, kPositionStream});
  std::vector<uint64_t> wanted = {0, token_count - 1, kFirstTokens - 1, token_count - kLocalTokens};
  // Both sides of the first segment boundary and of one chosen by the seed.
  const uint64_t boundaries = (token_count - kLocalTokens - 1) / kSegmentTokens;
  if (boundaries > 0) {
    const uint64_t chosen = 1 + UniformAt(key, 0, static_cast<uint32_t>(boundaries));
    for (const uint64_t boundary : {uint64_t{1}, chosen}) {
      wanted.push_back(boundary * kSegmentTokens - 1);
      wanted.push_back(boundary * kSegmentTokens);
    }
  }
  wanted.push_back(token_count - kLocalTokens + UniformAt(key, 1, kLocalTokens));
  // Just outside the steady zone.
  wanted.push_back(kFirstTokens);
  wanted.push_back(token_count - kLocalTokens - 1);

  std::vector<uint64_t> positions;
  absl::flat_hash_set<uint64_t> taken;
  for (size_t i = 0; positions.size() < needle_count; ++i) {
    const uint64_t position =
        i < wanted.size() ? wanted[i] : UniformAt(key, 2 + i, static_cast<uint32_t>(token_count));
    if (taken.insert(position).second) positions.push_back(position);
  }
  return positions;
}

uint64_t SteadyTailStart(uint64_t token_count) {
  const uint64_t clusterable = token_count > kLocalTokens ? token_count - kLocalTokens : 0;
  const uint64_t rest_begin = std::max(clusterable / kSegmentTokens * kSegmentTokens, kFirstTokens);
  return clusterable >= rest_begin + kSmallSegmentTokens ? clusterable : rest_begin;
}

absl::StatusOr<std::unique_ptr<World>> World::Create(const WorldConfig& config, ThreadPool* pool) {
  WAVEKV_RETURN_IF_ERROR(ValidateWorldConfig(config));
  return std::unique_ptr<World>(new World(config, pool));
}

World::World(const WorldConfig& config, ThreadPool* pool)
    : config_(config),
      model_(config.model),
      facts_(PlanFacts(config)),
      context_(model_, Tokens(), pool) {
  for (uint32_t layer = 0; layer < config_.model.layer_count; ++layer) {
    for (uint32_t kv_head = 0; kv_head < config_.model.kv_head_count; ++kv_head) {
      PlantFacts(model_, layer, kv_head, facts_, GroupQueries(layer, kv_head), &context_, pool);
    }
  }
}

std::vector<uint32_t> World::Tokens() const {
  std::vector<uint32_t> tokens = model_.BackgroundTokens(config_.token_count);
  for (uint32_t i = 0; i < config_.needle_count; ++i) tokens.push_back(Model::QuestionToken(i));
  return tokens;
}

std::vector<float> World::Queries(uint32_t layer, uint32_t fact_idx) const {
  return model_.Queries(layer, fact_idx, facts_[fact_idx].ask_position);
}

std::vector<std::byte> World::QueryBytes(uint32_t layer, uint32_t fact_idx) const {
  const std::vector<float> queries = Queries(layer, fact_idx);
  std::vector<std::byte> bytes(queries.size() * DTypeBytes(config_.model.dtype));
  ConvertFromFloat(config_.model.dtype, queries.data(), queries.size(), bytes.data());
  return bytes;
}

std::vector<float> World::GroupQueries(uint32_t layer, uint32_t kv_head) const {
  constexpr size_t kGroupFloats = static_cast<size_t>(kGroupSize) * kHeadDim;
  std::vector<float> group_queries;
  group_queries.reserve(facts_.size() * kGroupFloats);
  for (uint32_t i = 0; i < facts_.size(); ++i) {
    const std::vector<float> queries = Queries(layer, i);
    const float* group = queries.data() + kv_head * kGroupFloats;
    group_queries.insert(group_queries.end(), group, group + kGroupFloats);
  }
  return group_queries;
}

void World::AnswerHead(uint32_t layer, uint32_t kv_head, ThreadPool* pool,
                       ExactAnswers* answers) const {
  const std::vector<float> queries = GroupQueries(layer, kv_head);
  std::vector<PrefixQuery> prefix_queries;
  for (size_t i = 0; i < facts_.size() * kGroupSize; ++i) {
    prefix_queries.push_back(
        {queries.data() + i * kHeadDim, facts_[i / kGroupSize].ask_position + 1});
  }
  const std::vector<ExactResult> results =
      AttendExactly(context_.Rows(layer, kv_head), prefix_queries, /*with_values=*/true, pool);
  for (size_t i = 0; i < results.size(); ++i) {
    float key[kHeadDim];
    context_.ReadKey(layer, kv_head, facts_[i / kGroupSize].position, key);
    double logit = 0;
    for (uint32_t d = 0; d < kHeadDim; ++d) logit += prefix_queries[i].query[d] * key[d];
    const double mass = std::exp(kSoftmaxScale * logit - results[i].lse);
    answers->needle_mass_min = std::min(answers->needle_mass_min, mass);
    answers->needle_mass_max = std::max(answers->needle_mass_max, mass);
    answers->logit_std += results[i].logit_var;
    const size_t head = layer * config_.model.query_head_count() + kv_head * kGroupSize;
    float* out = answers->outputs[i / kGroupSize].data() + (head + i % kGroupSize) * kHeadDim;
    for (uint32_t d = 0; d < kHeadDim; ++d) out[d] = static_cast<float>(results[i].out[d]);
  }
}

ExactAnswers World::AnswerExactly(ThreadPool* pool) const {
  const size_t heads = config_.model.layer_count * config_.model.query_head_count();
  ExactAnswers answers;
  answers.needle_mass_min = 1;
  answers.outputs.assign(facts_.size(), StepOutput(heads * kHeadDim));
  for (uint32_t layer = 0; layer < config_.model.layer_count; ++layer) {
    for (uint32_t kv_head = 0; kv_head < config_.model.kv_head_count; ++kv_head) {
      AnswerHead(layer, kv_head, pool, &answers);
    }
  }
  const auto queries = static_cast<double>(facts_.size() * heads);
  answers.logit_std = std::sqrt(answers.logit_std / queries);
  return answers;
}

}  // namespace wavekv::mock
