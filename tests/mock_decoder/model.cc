#include "tests/mock_decoder/model.h"

#include <algorithm>
#include <cmath>

#include "tests/mock_decoder/counter_random.h"

namespace wavekv::mock {
namespace {

constexpr uint32_t kPairs = kHeadDim / 2;
constexpr uint32_t kSlowPairs = kPairs / 4;
constexpr uint32_t kRunTokensMin = 4;
constexpr uint32_t kRunTokensMax = 19;
constexpr float kNoise = 0.5f;
constexpr float kMeanScale = 2.0f;

// One per kind of random number, so that no two share a stream.
enum Stream : uint64_t {
  kMeanStream = 1,
  kTopicStream,
  kCodeStream,
  kRunStream,
  kWordStream,
  kNoiseStream,
  kValueStream,
  kSharedQueryStream,
  kOwnQueryStream,
  kDigitStream,
  kQuestionTopicStream,
};

// Pairs are (i, i + kPairs), as in Llama.
void Rotate(const Rotation& rotation, float* vector) {
  for (uint32_t i = 0; i < kPairs; ++i) {
    const float a = vector[i];
    const float b = vector[i + kPairs];
    vector[i] = a * rotation.cos[i] - b * rotation.sin[i];
    vector[i + kPairs] = a * rotation.sin[i] + b * rotation.cos[i];
  }
}

float Dot(const float* a, const float* b) {
  float sum = 0;
  for (uint32_t d = 0; d < kHeadDim; ++d) sum += a[d] * b[d];
  return sum;
}

void Normalise(float* vector) {
  const float inverse = 1.0f / std::sqrt(Dot(vector, vector));
  for (uint32_t d = 0; d < kHeadDim; ++d) vector[d] *= inverse;
}

}  // namespace

Model::Model(const ModelConfig& config) : config_(config) {
  for (uint32_t i = 0; i < kPairs; ++i) {
    frequencies_[i] = std::pow(kRopeBase, -static_cast<double>(i) / kPairs);
  }
  const size_t heads = static_cast<size_t>(config.layer_count) * config.kv_head_count;
  means_.resize(heads * kHeadDim);
  topics_.resize(heads * kTopicCount * kHeadDim);
  codes_.resize(heads * kDigitCount * kHeadDim);
  FillGauss(StreamKey({config.seed, kMeanStream}), means_.size(), kMeanScale, means_.data());
  FillGauss(StreamKey({config.seed, kTopicStream}), topics_.size(), 1.0f, topics_.data());
  FillGauss(StreamKey({config.seed, kCodeStream}), codes_.size(), 1.0f, codes_.data());
  // Real heads carry their mean where RoPE turns slowly; elsewhere it would average out.
  for (size_t i = 0; i < means_.size(); ++i) {
    if (i % kPairs < kPairs - kSlowPairs) means_[i] = 0;
  }
}

std::vector<uint32_t> Model::BackgroundTokens(uint64_t count) const {
  const uint64_t runs = StreamKey({config_.seed, kRunStream});
  const uint64_t words = StreamKey({config_.seed, kWordStream});
  std::vector<uint32_t> tokens;
  tokens.reserve(count);
  for (uint64_t run = 0; tokens.size() < count; ++run) {
    const auto topic = static_cast<uint32_t>(UniformAt(runs, 2 * run, kTopicCount));
    const uint64_t length =
        kRunTokensMin + UniformAt(runs, 2 * run + 1, kRunTokensMax - kRunTokensMin + 1);
    for (uint64_t i = 0; i < length && tokens.size() < count; ++i) {
      const auto word = static_cast<uint32_t>(UniformAt(words, tokens.size(), kWordsPerTopic));
      tokens.push_back(topic * kWordsPerTopic + word);
    }
  }
  return tokens;
}

Rotation Model::RotationAt(uint64_t position) const {
  Rotation rotation;
  for (uint32_t i = 0; i < kPairs; ++i) {
    const double angle = static_cast<double>(position) * frequencies_[i];
    rotation.cos[i] = static_cast<float>(std::cos(angle));
    rotation.sin[i] = static_cast<float>(std::sin(angle));
  }
  return rotation;
}

void Model::KeyValue(uint32_t layer, uint32_t kv_head, uint32_t token, uint64_t position,
                     const Rotation& rotation, float* key, float* value) const {
  const size_t head = static_cast<size_t>(layer) * config_.kv_head_count + kv_head;
  const uint64_t topic =
      token < kVocabularySize
          ? token / kWordsPerTopic
          : UniformAt(StreamKey({config_.seed, kQuestionTopicStream}), token, kTopicCount);
  FillGauss(StreamKey({config_.seed, kNoiseStream, head, token, position}), kHeadDim, kNoise, key);
  FillGauss(StreamKey({config_.seed, kValueStream, head, token, position}), kHeadDim, 1.0f, value);
  const float* mean = means_.data() + head * kHeadDim;
  const float* direction = topics_.data() + (head * kTopicCount + topic) * kHeadDim;
  for (uint32_t d = 0; d < kHeadDim; ++d) key[d] += mean[d] + direction[d];
  Rotate(rotation, key);
}

std::vector<float> Model::Queries(uint32_t layer, uint32_t ask_idx, uint64_t ask_position) const {
  const Rotation rotation = RotationAt(ask_position);
  std::vector<float> queries(static_cast<size_t>(config_.query_head_count()) * kHeadDim);
  const float own_share = std::sqrt(1.0f - kGroupShare * kGroupShare);
  for (uint32_t query_head = 0; query_head < config_.query_head_count(); ++query_head) {
    float shared[kHeadDim];
    float own[kHeadDim];
    FillGauss(
        StreamKey({config_.seed, kSharedQueryStream, layer, query_head / kGroupSize, ask_idx}),
        kHeadDim, 1.0f, shared);
    FillGauss(StreamKey({config_.seed, kOwnQueryStream, layer, query_head, ask_idx}), kHeadDim,
              1.0f, own);
    Normalise(shared);
    const float overlap = Dot(own, shared);
    for (uint32_t d = 0; d < kHeadDim; ++d) own[d] -= overlap * shared[d];
    Normalise(own);
    float* query = queries.data() + static_cast<size_t>(query_head) * kHeadDim;
    for (uint32_t d = 0; d < kHeadDim; ++d) {
      query[d] = kQueryNorm * (kGroupShare * shared[d] + own_share * own[d]);
    }
    Rotate(rotation, query);
  }
  std::vector<std::byte> rounded(queries.size() * DTypeBytes(config_.dtype));
  ConvertFromFloat(config_.dtype, queries.data(), queries.size(), rounded.data());
  ConvertToFloat(config_.dtype, rounded.data(), queries.size(), queries.data());
  return queries;
}

uint32_t Model::Digit(uint32_t layer, uint32_t kv_head, uint32_t token) const {
  return static_cast<uint32_t>(
      UniformAt(StreamKey({config_.seed, kDigitStream, layer, kv_head}), token, kDigitCount));
}

std::span<const float> Model::Code(uint32_t layer, uint32_t kv_head, uint32_t digit) const {
  const size_t head = static_cast<size_t>(layer) * config_.kv_head_count + kv_head;
  return {codes_.data() + (head * kDigitCount + digit) * kHeadDim, kHeadDim};
}

std::optional<uint32_t> Model::DecodeDigit(uint32_t layer, uint32_t kv_head,
                                           const float* output) const {
  uint32_t best = 0;
  float best_share = 0;
  for (uint32_t digit = 0; digit < kDigitCount; ++digit) {
    const float* code = Code(layer, kv_head, digit).data();
    const float share = Dot(output, code) / Dot(code, code);
    if (share > best_share) {
      best = digit;
      best_share = share;
    }
  }
  if (best_share < kDigitFloor) return std::nullopt;
  return best;
}

std::optional<uint32_t> Model::Decode(std::span<const float> outputs) const {
  std::vector<uint32_t> digits;
  const float* output = outputs.data();
  for (uint32_t layer = 0; layer < config_.layer_count; ++layer) {
    for (uint32_t head = 0; head < config_.query_head_count(); ++head, output += kHeadDim) {
      const std::optional<uint32_t> digit = DecodeDigit(layer, head / kGroupSize, output);
      if (!digit.has_value()) return std::nullopt;
      if (head % kGroupSize == 0) digits.push_back(*digit);
      if (digits.back() != *digit) return std::nullopt;
    }
  }
  for (uint32_t token = 0; token < kVocabularySize; ++token) {
    size_t match = 0;
    while (match < digits.size() &&
           Digit(static_cast<uint32_t>(match) / config_.kv_head_count,
                 static_cast<uint32_t>(match) % config_.kv_head_count, token) == digits[match]) {
      ++match;
    }
    if (match == digits.size()) return token;
  }
  return std::nullopt;
}

}  // namespace wavekv::mock
