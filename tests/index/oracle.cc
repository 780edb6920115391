#include "tests/index/oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>

namespace wavekv::test {

uint64_t RunSeed() {
  static const uint64_t seed = [] {
    const char* given = std::getenv("WAVEKV_TEST_SEED");
    const uint64_t value =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::cout << "WAVEKV_TEST_SEED=" << value << std::endl;
    return value;
  }();
  return seed;
}

std::mt19937_64 NewRandom(uint64_t stream) {
  std::seed_seq sequence{RunSeed(), stream};
  return std::mt19937_64(sequence);
}

std::vector<float> Gaussian(std::mt19937_64& random, size_t count, double deviation) {
  std::normal_distribution<float> normal(0, static_cast<float>(deviation));
  std::vector<float> x(count);
  for (float& value : x) value = normal(random);
  return x;
}

std::vector<float> TopicKeys(std::mt19937_64& random, uint32_t tokens, uint32_t dim,
                             uint32_t topics, uint32_t run, double noise) {
  const std::vector<float> centres = Gaussian(random, size_t{topics} * dim);
  std::vector<float> keys = Gaussian(random, size_t{tokens} * dim, noise);
  uint32_t topic = 0;
  for (uint32_t i = 0; i < tokens; ++i) {
    if (i % run == 0) topic = static_cast<uint32_t>(random() % topics);
    for (uint32_t j = 0; j < dim; ++j) {
      keys[size_t{i} * dim + j] += centres[size_t{topic} * dim + j];
    }
  }
  return keys;
}

StoredRows Store(DType dtype, uint32_t dim, std::span<const float> rows) {
  StoredRows stored{dtype, dim, {}, {}};
  if (rows.empty()) return stored;
  stored.bytes.resize(rows.size() * DTypeBytes(dtype));
  stored.floats.resize(rows.size());
  ConvertFromFloat(dtype, rows.data(), rows.size(), stored.bytes.data());
  ConvertToFloat(dtype, stored.bytes.data(), rows.size(), stored.floats.data());
  return stored;
}

std::vector<double> ExactScores(std::span<const float> query, std::span<const float> keys,
                                double scale) {
  const size_t dim = query.size();
  std::vector<double> scores(keys.size() / dim);
  for (size_t i = 0; i < scores.size(); ++i) {
    double sum = 0;
    for (size_t j = 0; j < dim; ++j) sum += static_cast<double>(query[j]) * keys[i * dim + j];
    scores[i] = scale * sum;
  }
  return scores;
}

double LogSumExp(std::span<const double> x) {
  double top = -std::numeric_limits<double>::infinity();
  for (const double value : x) top = std::max(top, value);
  if (std::isinf(top)) return top;
  double sum = 0;
  for (const double value : x) sum += std::exp(value - top);
  return top + std::log(sum);
}

double TailFactor(double v) {
  const double y = (3 * v / 8 - std::min(v / 2, std::sqrt(v)) / 2) / 4;
  return std::pow(1 + y + y * y / 2 + y * y * y / 6, 4);
}

ExactAttention Attend(std::span<const float> query, std::span<const float> keys,
                      std::span<const float> values, uint32_t value_dim, double scale) {
  const std::vector<double> scores = ExactScores(query, keys, scale);
  ExactAttention exact;
  exact.lse = LogSumExp(scores);
  exact.out.assign(value_dim, 0);
  for (size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - exact.lse);
    for (uint32_t j = 0; j < value_dim; ++j) exact.out[j] += weight * values[i * value_dim + j];
  }
  return exact;
}

double RelativeError(std::span<const float> a, std::span<const double> b) {
  EXPECT_EQ(a.size(), b.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return norm > 0 ? std::sqrt(difference / norm) : std::sqrt(difference);
}

BuiltSegment Build(ComputeBackend& backend, const StoredRows& keys, const StoredRows& values,
                   uint64_t first_position, const ClusterOptions& options,
                   std::span<const uint16_t> labels) {
  BuiltSegment built;
  built.keys.resize(keys.bytes.size());
  built.values.resize(values.bytes.size());
  ClusterInput input;
  input.first_position = first_position;
  input.token_count = keys.count();
  input.key_dim = keys.dim;
  input.value_dim = values.dim;
  input.dtype = keys.dtype;
  input.keys = keys.bytes.data();
  input.values = values.bytes.data();
  input.labels = labels;
  absl::StatusOr<SegmentHead> head =
      backend.ClusterSegment(input, options, built.keys.data(), built.values.data());
  if (!head.ok()) {
    ADD_FAILURE() << head.status();
    return built;
  }
  built.head = *std::move(head);
  return built;
}

}  // namespace wavekv::test
