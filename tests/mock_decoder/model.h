// The mock decoder's weights: where tokens, keys, values and queries come from.
//
// Keys have the structure of real ones. Each KV head has a mean, carried by the slow RoPE pairs,
// and a direction per topic; the token stream stays with a topic for a few tokens; a key is mean +
// topic + 0.5 noise, then RoPE. Values are independent. Everything depends on (seed, token,
// position) alone, so that a prefill needs no attention and can be generated in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "storage/base/dtype.h"

namespace wavekv::mock {

inline constexpr uint32_t kHeadDim = 64;
inline constexpr uint32_t kGroupSize = 4;  // Query heads per KV head.
inline constexpr uint32_t kTopicCount = 512;
inline constexpr uint32_t kWordsPerTopic = 64;
inline constexpr uint32_t kVocabularySize = kTopicCount * kWordsPerTopic;
inline constexpr uint32_t kDigitCount = 16;     // Sub-codes per (layer, KV head).
inline constexpr double kRopeBase = 1e6;        // Slowest pair: 0.2 rad over 131,072 tokens.
inline constexpr float kSoftmaxScale = 0.125f;  // 1 / sqrt(kHeadDim)
// |query|: with it one query's background logits spread by about 2 (reported by every run).
inline constexpr float kQueryNorm = 13.5f;
// Cosine between a query head and the direction its group shares.
inline constexpr float kGroupShare = 0.8f;
// An output carries a digit only when its projection on that code is at least this share of it.
inline constexpr float kDigitFloor = 0.5f;

// Cosines and sines of one position's RoPE angles.
struct Rotation {
  float cos[kHeadDim / 2];
  float sin[kHeadDim / 2];
};

struct ModelConfig {
  uint32_t layer_count = 4;
  uint32_t kv_head_count = 2;
  DType dtype = DType::kBF16;  // Of keys, values and queries.
  uint64_t seed = 1;

  uint32_t query_head_count() const { return kv_head_count * kGroupSize; }
};

// Immutable and thread-safe.
class Model {
 public:
  explicit Model(const ModelConfig& config);

  const ModelConfig& config() const { return config_; }

  // `count` background tokens, each < kVocabularySize: runs of 4 to 19 tokens of one topic.
  std::vector<uint32_t> BackgroundTokens(uint64_t count) const;
  // The token that asks for fact `ask_idx`; outside the background's vocabulary.
  static uint32_t QuestionToken(uint32_t ask_idx) { return kVocabularySize + ask_idx; }

  Rotation RotationAt(uint64_t position) const;

  // key [kHeadDim], with RoPE applied, and value [kHeadDim] of a token.
  void KeyValue(uint32_t layer, uint32_t kv_head, uint32_t token, uint64_t position,
                const Rotation& rotation, float* key, float* value) const;

  // queries [query_heads, kHeadDim] of fact `ask_idx` in `layer`, with RoPE of the asking position,
  // rounded to the model's dtype.
  std::vector<float> Queries(uint32_t layer, uint32_t ask_idx, uint64_t ask_position) const;

  // The digit of `token` that (layer, kv_head) carries, and the value vector that means it.
  uint32_t Digit(uint32_t layer, uint32_t kv_head, uint32_t token) const;
  std::span<const float> Code(uint32_t layer, uint32_t kv_head, uint32_t digit) const;

  // The token that attention outputs [layers, query_heads, kHeadDim] spell: every query head of
  // every layer must carry the token's digit. Nothing when they spell no token.
  std::optional<uint32_t> Decode(std::span<const float> outputs) const;

 private:
  std::optional<uint32_t> DecodeDigit(uint32_t layer, uint32_t kv_head, const float* output) const;

  const ModelConfig config_;
  double frequencies_[kHeadDim / 2];
  std::vector<float> means_;   // [layers, kv_heads, kHeadDim]
  std::vector<float> topics_;  // [layers, kv_heads, kTopicCount, kHeadDim]
  std::vector<float> codes_;   // [layers, kv_heads, kDigitCount, kHeadDim]
};

}  // namespace wavekv::mock
