#include "bench/outlier_data.h"

#include <algorithm>
#include <cmath>

namespace wavekv::bench {
namespace {

constexpr int kNeedles = 32;
constexpr int kPlainQueries = 32;
constexpr int kRealQueries = 16;
constexpr size_t kLateSteps = 512;

std::vector<float> Gaussian(std::mt19937_64& random, size_t count, double deviation = 1) {
  std::normal_distribution<float> normal(0, static_cast<float>(deviation));
  std::vector<float> x(count);
  for (float& value : x) value = normal(random);
  return x;
}

// Query heads of about this length, 80 % of it in common.
std::vector<float> GroupQueries(std::mt19937_64& random, uint32_t group, uint32_t dim,
                                double length) {
  const double unit = length / std::sqrt(static_cast<double>(dim));
  const std::vector<float> shared = Gaussian(random, dim, 0.8 * unit);
  std::vector<float> queries = Gaussian(random, size_t{group} * dim, 0.6 * unit);
  for (uint32_t g = 0; g < group; ++g) {
    for (uint32_t j = 0; j < dim; ++j) queries[g * dim + j] += shared[j];
  }
  return queries;
}

double Dot(const float* a, const float* b, uint32_t dim) {
  double sum = 0;
  for (uint32_t j = 0; j < dim; ++j) sum += static_cast<double>(a[j]) * b[j];
  return sum;
}

// Adds to key `question.needle` the shortest component along the group's mean query that gives it
// kNeedleMass for every head. False when no length does.
bool Plant(DataSet* data, const Question& question) {
  const uint32_t dim = data->dim;
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  float* key = &data->keys[static_cast<size_t>(question.needle) * dim];
  std::vector<float> direction(dim, 0);
  for (uint32_t g = 0; g < data->group; ++g) {
    for (uint32_t j = 0; j < dim; ++j) direction[j] += question.queries[g * dim + j];
  }
  const double norm = std::sqrt(Dot(direction.data(), direction.data(), dim));
  for (float& x : direction) x = static_cast<float>(x / norm);
  double length = 0;
  for (uint32_t g = 0; g < data->group; ++g) {
    const float* query = &question.queries[g * dim];
    std::vector<double> others;
    for (uint32_t i = 0; i < data->tokens; ++i) {
      if (i != question.needle)
        others.push_back(scale * Dot(query, &data->keys[size_t{i} * dim], dim));
    }
    const double wanted = LogSumExp(others) + std::log(kNeedleMass / (1 - kNeedleMass));
    const double per_length = scale * Dot(query, direction.data(), dim);
    if (per_length < 0.1 * scale * std::sqrt(Dot(query, query, dim))) return false;
    length = std::max(length, (wanted - scale * Dot(query, key, dim)) / per_length);
  }
  for (uint32_t j = 0; j < dim; ++j) key[j] += static_cast<float>(length) * direction[j];
  return true;
}

uint32_t NeedlePosition(std::mt19937_64& random, const DataSet& data) {
  return kFirstTokens +
         static_cast<uint32_t>(random() % (data.tokens - kFirstTokens - kLocalTokens));
}

void RoundToStorage(DType dtype, std::vector<float>* x) {
  std::vector<std::byte> stored(x->size() * DTypeBytes(dtype));
  ConvertFromFloat(dtype, x->data(), x->size(), stored.data());
  ConvertToFloat(dtype, stored.data(), x->size(), x->data());
}

}  // namespace

double LogSumExp(const std::vector<double>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const double value : x) sum += std::exp(value - top);
  return top + std::log(sum);
}

DataSet Synthetic(std::mt19937_64& random, bool topics, uint32_t tokens, double query_length) {
  DataSet data;
  data.name = std::string(topics ? "topics" : "gaussian") + ", " + std::to_string(tokens) +
              " tokens, |q| = " + std::to_string(query_length).substr(0, 4);
  data.tokens = tokens;
  data.dim = 64;
  data.group = 4;
  data.keys = Gaussian(random, size_t{tokens} * data.dim, topics ? 0.5 : 1);
  data.values = Gaussian(random, size_t{tokens} * data.dim);
  if (topics) {
    const uint32_t topic_count = std::max(8u, tokens / 32);
    const std::vector<float> centres = Gaussian(random, size_t{topic_count} * data.dim);
    size_t topic = 0;
    for (uint32_t i = 0; i < tokens; ++i) {
      if (i % 4 == 0) topic = random() % topic_count;
      for (uint32_t j = 0; j < data.dim; ++j)
        data.keys[size_t{i} * data.dim + j] += centres[topic * data.dim + j];
    }
  }
  for (int i = 0; i < kNeedles + kPlainQueries; ++i) {
    Question question{GroupQueries(random, data.group, data.dim, query_length), -1};
    if (i < kNeedles) {
      question.needle = NeedlePosition(random, data);
      if (!Plant(&data, question)) continue;
    }
    data.questions.push_back(std::move(question));
  }
  RoundToStorage(data.dtype, &data.keys);
  RoundToStorage(data.dtype, &data.values);
  return data;
}

DataSet Real(std::mt19937_64& random, const RecordedLayer& layer, uint32_t head, bool needle) {
  DataSet data;
  data.name = "real l" + std::to_string(layer.layer) + " h" + std::to_string(head);
  data.dtype = layer.dtype;
  data.tokens = layer.token_count;
  data.dim = layer.key_dim;
  data.group = layer.group_size();
  data.keys = layer.Keys(head);
  data.values = layer.Values(head);
  // The last ones have nearly all tokens before them.
  const size_t late = std::min(kLateSteps, layer.queries.size());
  for (int i = 0; i < (needle ? 1 : kRealQueries); ++i) {
    const RecordedQuery& step = layer.queries[layer.queries.size() - 1 - random() % late];
    const auto first = step.queries.begin() + static_cast<ptrdiff_t>(head * data.group * data.dim);
    Question question{{first, first + static_cast<ptrdiff_t>(data.group * data.dim)}};
    if (needle) {
      question.needle = NeedlePosition(random, data);
      if (!Plant(&data, question)) continue;
    }
    data.questions.push_back(std::move(question));
  }
  RoundToStorage(data.dtype, &data.keys);
  return data;
}

}  // namespace wavekv::bench
