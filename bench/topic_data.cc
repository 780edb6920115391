#include "bench/topic_data.h"

#include <cmath>
#include <random>

#include "storage/base/check.h"

namespace wavekv::bench {
namespace {

// The walk of a query: x <- kWalk x + sqrt(1 - kWalk^2) topic, which keeps its variance at 1.
constexpr float kWalk = 0.98f;
constexpr uint32_t kWarmUpSteps = 300;  // 0.98^300 is 0.002: the start is forgotten.
constexpr float kQueryScale = 3.5f;
constexpr float kSharedLength = 0.8f;  // Of a query, in common to its group.

constexpr float kSharedVariance = 0.8f;  // Of a drifting query.
constexpr float kTargetWeight = 0.2f;
constexpr uint32_t kTargetSteps = 50;

enum class Stream : uint32_t { kKeys, kValues };

std::mt19937_64 NewRandom(const TopicStretchId& id, Stream stream) {
  std::seed_seq seed{static_cast<uint32_t>(id.seed),
                     static_cast<uint32_t>(id.seed >> 32),
                     id.layer,
                     id.kv_head,
                     id.stretch,
                     static_cast<uint32_t>(stream)};
  return std::mt19937_64(seed);
}

}  // namespace

TopicStretch MakeTopicStretch(const TopicStretchId& id, uint32_t token_count, uint32_t dim) {
  WAVEKV_CHECK(token_count <= kTopicStretchTokens, "a stretch has at most kTopicStretchTokens");
  std::mt19937_64 random = NewRandom(id, Stream::kKeys);
  std::normal_distribution<float> normal;
  TopicStretch made;
  made.topics.resize(size_t{kTopicCount} * dim);
  for (float& x : made.topics) x = normal(random);
  made.keys.resize(size_t{token_count} * dim);
  const float* topic = made.topics.data();
  for (uint32_t i = 0; i < token_count; ++i) {
    if (i % kTokensPerTopic == 0) topic = &made.topics[random() % kTopicCount * dim];
    float* key = &made.keys[size_t{i} * dim];
    for (uint32_t j = 0; j < dim; ++j) key[j] = topic[j] + kTopicNoise * normal(random);
  }
  return made;
}

std::vector<float> MakeTopicValues(const TopicStretchId& id, uint32_t token_count, uint32_t dim) {
  std::mt19937_64 random = NewRandom(id, Stream::kValues);
  std::normal_distribution<float> normal;
  std::vector<float> values(size_t{token_count} * dim);
  for (float& x : values) x = normal(random);
  return values;
}

// The group's common walk and one of each head's own.
std::vector<float> WalkTopicQueries(const TopicWalkId& id, std::span<const float> topics,
                                    uint32_t steps, uint32_t group_size, uint32_t dim) {
  std::seed_seq seed{static_cast<uint32_t>(id.seed), static_cast<uint32_t>(id.seed >> 32), id.layer,
                     id.kv_head, 0x9e37u};
  std::mt19937_64 random(seed);
  std::vector<float> walks(size_t{group_size + 1} * dim, 0.0f);
  std::vector<float> queries;
  queries.reserve(size_t{steps} * group_size * dim);
  const float step_length = std::sqrt(1 - kWalk * kWalk);
  const float own_length = std::sqrt(1 - kSharedLength * kSharedLength);
  const float* const common = &walks[size_t{group_size} * dim];
  for (uint32_t step = 0; step < kWarmUpSteps + steps; ++step) {
    for (uint32_t walk = 0; walk <= group_size; ++walk) {
      const float* topic = &topics[random() % (topics.size() / dim) * dim];
      for (uint32_t j = 0; j < dim; ++j) {
        float& x = walks[size_t{walk} * dim + j];
        x = kWalk * x + step_length * topic[j];
      }
    }
    if (step < kWarmUpSteps) continue;
    for (uint32_t g = 0; g < group_size; ++g) {
      for (uint32_t j = 0; j < dim; ++j) {
        queries.push_back(kQueryScale *
                          (kSharedLength * common[j] + own_length * walks[g * dim + j]));
      }
    }
  }
  return queries;
}

std::vector<float> DriftTopicQueries(const TopicWalkId& id, std::span<const float> topics,
                                     uint32_t steps, uint32_t group_size, uint32_t dim) {
  std::seed_seq seed{static_cast<uint32_t>(id.seed), static_cast<uint32_t>(id.seed >> 32), id.layer,
                     id.kv_head, 0x85ebu};
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> walks(size_t{group_size + 1} * dim);  // The common one last.
  for (float& x : walks) x = normal(random);
  const float step_length = std::sqrt(1 - kWalk * kWalk);
  const float common_length = std::sqrt(kSharedVariance),
              own_length = std::sqrt(1 - kSharedVariance);
  const float scale = kQueryScale / std::sqrt(1 + kTargetWeight * kTargetWeight);
  const float* const common = &walks[size_t{group_size} * dim];
  const size_t topic_count = topics.size() / dim;
  const float* target = &topics[random() % topic_count * dim];
  std::vector<float> queries;
  queries.reserve(size_t{steps} * group_size * dim);
  for (uint32_t step = 0; step < steps; ++step) {
    if (random() % kTargetSteps == 0) target = &topics[random() % topic_count * dim];
    for (float& x : walks) x = kWalk * x + step_length * normal(random);
    for (uint32_t g = 0; g < group_size; ++g) {
      for (uint32_t j = 0; j < dim; ++j) {
        queries.push_back(scale * (common_length * common[j] + own_length * walks[g * dim + j] +
                                   kTargetWeight * target[j]));
      }
    }
  }
  return queries;
}

}  // namespace wavekv::bench
