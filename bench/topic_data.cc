#include "bench/topic_data.h"

#include <random>

#include "storage/base/check.h"

namespace wavekv::bench {
namespace {

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

}  // namespace wavekv::bench
