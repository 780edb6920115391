// Keys with the structure of a long text, for the benchmarks: topics that come and go.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace wavekv::bench {

inline constexpr uint32_t kTopicStretchTokens =
    8192;                                       // Topics are drawn anew after so many tokens.
inline constexpr uint32_t kTopicCount = 256;    // In a stretch.
inline constexpr uint32_t kTokensPerTopic = 4;  // In a row, then another topic.
inline constexpr float kTopicNoise = 0.5f;

// Which stretch of which KV head; each draws from a generator of its own, so stretches can be made
// in any order and by any thread.
struct TopicStretchId {
  uint64_t seed = 0;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  uint32_t stretch = 0;
};

struct TopicStretch {
  std::vector<float> topics;  // [kTopicCount, dim], N(0, 1)
  std::vector<float> keys;    // [token_count, dim], topic + kTopicNoise * N(0, 1)
};

// The keys of `token_count` (at most kTopicStretchTokens) tokens.
TopicStretch MakeTopicStretch(const TopicStretchId& id, uint32_t token_count, uint32_t dim);

// Which queries: those that ask one KV head of one layer.
struct TopicWalkId {
  uint64_t seed = 0;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
};

// Queries [steps, group_size, dim] of a KV head's query heads, which walk slowly over `topics`
// [.., dim]: an AR(1) walk with 0.98, 0.8 of its length common to the group, scaled by 3.5.
std::vector<float> WalkTopicQueries(const TopicWalkId& id, std::span<const float> topics,
                                    uint32_t steps, uint32_t group_size, uint32_t dim);

// Queries [steps, group_size, dim] that drift: an AR(1) walk of noise with 0.98, 0.8 of its
// variance common to the group, drawn with weight 0.2 towards one of `topics` [.., dim], which
// changes every 50 steps on average; scaled by 3.5.
std::vector<float> DriftTopicQueries(const TopicWalkId& id, std::span<const float> topics,
                                     uint32_t steps, uint32_t group_size, uint32_t dim);

// The values [token_count, dim] of the same tokens: independent, N(0, 1).
std::vector<float> MakeTopicValues(const TopicStretchId& id, uint32_t token_count, uint32_t dim);

}  // namespace wavekv::bench
