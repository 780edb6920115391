#include "tests/mock_decoder/planting.h"

#include <algorithm>
#include <cmath>

#include "tests/mock_decoder/exact_attention.h"

namespace wavekv::mock {
namespace {

// Needles are weak competitors of each other, so that their lengths settle at once.
constexpr int kRounds = 3;

using Row = std::vector<float>;

double Logit(const float* query, const Row& key) {
  float sum = 0;
  for (uint32_t d = 0; d < kHeadDim; ++d) sum += query[d] * key[d];
  return kSoftmaxScale * sum;
}

Row MeanDirection(const float* queries) {
  Row direction(kHeadDim, 0.0f);
  float square = 0;
  for (uint32_t d = 0; d < kHeadDim; ++d) {
    for (uint32_t g = 0; g < kGroupSize; ++g) direction[d] += queries[g * kHeadDim + d];
    square += direction[d] * direction[d];
  }
  for (float& x : direction) x /= std::sqrt(square);
  return direction;
}

// The needles of one (layer, KV head) while their lengths are being found.
struct Needles {
  std::span<const float> queries;       // [facts, group, kHeadDim]
  std::vector<ExactResult> background;  // [facts, group], before anything was planted
  std::vector<Row> base;                // [facts] the background's keys
  std::vector<Row> planted;             // [facts]

  // Log mass of all the asking step of fact `i` sees but its own needle.
  double OthersLse(size_t i, uint32_t g) const {
    const size_t idx = i * kGroupSize + g;
    const float* query = queries.data() + idx * kHeadDim;
    const double lse = background[idx].lse;
    double share = 1 - std::exp(Logit(query, base[i]) - lse);
    for (size_t j = 0; j < base.size(); ++j) {
      if (j == i) continue;
      share += std::exp(Logit(query, planted[j]) - lse) - std::exp(Logit(query, base[j]) - lse);
    }
    return lse + std::log(share);
  }

  // Gives needle `i` the shortest component with which every query head of the group finds it.
  void Stretch(size_t i) {
    const float* group = queries.data() + i * kGroupSize * kHeadDim;
    const Row direction = MeanDirection(group);
    double length = 0;
    for (uint32_t g = 0; g < kGroupSize; ++g) {
      const float* query = group + static_cast<size_t>(g) * kHeadDim;
      const double wanted = OthersLse(i, g) + std::log(kNeedleMass / (1 - kNeedleMass));
      length = std::max(length, (wanted - Logit(query, base[i])) / Logit(query, direction));
    }
    for (uint32_t d = 0; d < kHeadDim; ++d) {
      planted[i][d] = base[i][d] + static_cast<float>(length) * direction[d];
    }
  }
};

}  // namespace

void PlantFacts(const Model& model, uint32_t layer, uint32_t kv_head, std::span<const Fact> facts,
                std::span<const float> queries, Context* context, ThreadPool* pool) {
  Needles needles;
  needles.queries = queries;
  std::vector<PrefixQuery> prefix_queries;
  for (size_t i = 0; i < facts.size(); ++i) {
    for (uint32_t g = 0; g < kGroupSize; ++g) {
      prefix_queries.push_back(
          {queries.data() + (i * kGroupSize + g) * kHeadDim, facts[i].ask_position + 1});
    }
    Row key(kHeadDim);
    context->ReadKey(layer, kv_head, facts[i].position, key.data());
    needles.base.push_back(key);
    needles.planted.push_back(key);
  }
  needles.background = AttendExactly(context->Rows(layer, kv_head), prefix_queries,
                                     /*with_values=*/false, pool);
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < facts.size(); ++i) needles.Stretch(i);
  }
  for (size_t i = 0; i < facts.size(); ++i) {
    context->SetKey(layer, kv_head, facts[i].position, needles.planted[i].data());
    const uint32_t digit = model.Digit(layer, kv_head, facts[i].answer);
    context->SetValue(layer, kv_head, facts[i].position, model.Code(layer, kv_head, digit).data());
  }
}

}  // namespace wavekv::mock
