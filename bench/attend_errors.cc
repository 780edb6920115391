#include "bench/attend_errors.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "bench/built_head.h"
#include "bench/exact_attention.h"
#include "bench/or_die.h"
#include "index/backend/cpu_backend.h"

namespace wavekv::bench {
namespace {

constexpr double kPaperRetrieved = 0.018;
constexpr double kPaperEstimated = 0.232;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Sum over the group of each head's softmax over the centroids' scores.
std::vector<double> RankAsThePaper(const ClusterScores& scores) {
  std::vector<double> rank(scores.cluster_count, 0);
  for (uint32_t g = 0; g < scores.group_size; ++g) {
    const float* logits = &scores.logits[size_t{g} * scores.cluster_count];
    const double top = *std::max_element(logits, logits + scores.cluster_count);
    double sum = 0;
    for (uint32_t c = 0; c < scores.cluster_count; ++c) sum += std::exp(logits[c] - top);
    for (uint32_t c = 0; c < scores.cluster_count; ++c) rank[c] += std::exp(logits[c] - top) / sum;
  }
  return rank;
}

// One pseudo-token for each cluster: the centroid's score plus log(size), and the mean value.
PartialAttention EstimateAsThePaper(HeadIndex index, std::span<const uint32_t> clusters,
                                    const GroupQuery& query, const ClusterScores& scores) {
  PartialAttention result;
  for (uint32_t g = 0; g < query.group_size; ++g) {
    const float* logits = &scores.logits[size_t{g} * scores.cluster_count];
    double top = -kInfinity, total = 0;
    for (const uint32_t c : clusters) top = std::max<double>(top, logits[c]);
    std::vector<double> out(query.value_dim, 0);
    for (const uint32_t c : clusters) {
      const auto [segment_idx, cluster_idx] = LocateCluster(index, c);
      const SegmentHead& segment = *index[segment_idx];
      const double weight = segment.sizes[cluster_idx] * std::exp(logits[c] - top);
      const std::vector<double> value = StoredValueMean(segment, cluster_idx);
      total += weight;
      for (size_t j = 0; j < out.size(); ++j) out[j] += weight * value[j];
    }
    for (const double x : out) result.out.push_back(static_cast<float>(x / total));
    result.lse.push_back(static_cast<float>(top + std::log(total)));
  }
  return result;
}

PartialAttention AttendAsThePaper(ComputeBackend& backend, const BuiltHead& head,
                                  const GroupQuery& query) {
  ClusterScores scores;
  const std::vector<float> nothing(query.group_size, -kInfinity);
  OrDie(backend.RankClusters(head.index, query, nothing, &scores));
  const std::vector<double> rank = RankAsThePaper(scores);
  std::vector<uint32_t> order(scores.cluster_count);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return rank[a] > rank[b]; });
  const auto clusters = static_cast<double>(scores.cluster_count);
  const auto retrieved_end = order.begin() + std::lround(std::ceil(kPaperRetrieved * clusters));
  const auto estimated_end = retrieved_end + std::lround(std::ceil(kPaperEstimated * clusters));
  const std::vector<uint32_t> retrieved(order.begin(), retrieved_end);
  const std::vector<uint32_t> estimated(retrieved_end, estimated_end);
  PartialAttention answer, exact;
  OrDie(backend.AttendRows(head.steady, query, &answer));
  OrDie(backend.AttendClusters(head.index, retrieved, query, &exact));
  MergePartial(exact, &answer);
  MergePartial(EstimateAsThePaper(head.index, estimated, query, scores), &answer);
  return answer;
}

}  // namespace

AttendErrors MeasureErrors(AttendWorld* world, uint32_t samples) {
  const WorldOptions& options = world->options();
  const uint32_t dim = options.dim, group = world->group_size();
  samples = std::min(samples, options.steps);
  std::vector<uint32_t> steps;
  std::vector<AttendOutcome> full, ours, retrieval_only;
  ZoneBudget without_estimation;
  without_estimation.estimate_ratio = 0;
  for (uint32_t i = 0; i < samples; ++i) {
    const uint32_t step = i * (options.steps / samples);
    steps.push_back(step);
    full.push_back(world->Attend(0, step, /*exact=*/true));
    ours.push_back(world->Attend(0, step, /*exact=*/false));
    retrieval_only.push_back(world->Attend(0, step, without_estimation));
  }
  const auto backend = CreateCpuBackend();
  const size_t count = size_t{samples} * options.query_heads;
  AttendErrors errors;
  for (auto* list : {&errors.full, &errors.ours, &errors.retrieval_only, &errors.paper}) {
    list->resize(count);
  }
  world->pool()->ParallelFor(options.kv_heads, [&](size_t kv_head) {
    const BuiltHead head =
        BuildHead(*backend, world->keys(static_cast<uint32_t>(kv_head)),
                  world->values(static_cast<uint32_t>(kv_head)), dim, DType::kBF16);
    const std::vector<float> keys = ToFloats(world->keys(static_cast<uint32_t>(kv_head)));
    const std::vector<float> values = ToFloats(world->values(static_cast<uint32_t>(kv_head)));
    for (uint32_t i = 0; i < samples; ++i) {
      const std::span<const float> queries =
          world->queries(0, steps[i]).subspan(kv_head * group * dim, size_t{group} * dim);
      const GroupQuery query = {queries, group, dim, dim, DType::kBF16, world->scale()};
      const PartialAttention paper = AttendAsThePaper(*backend, head, query);
      for (uint32_t g = 0; g < group; ++g) {
        const std::vector<double> exact =
            ExactAttention(queries.subspan(size_t{g} * dim, dim), keys, values, world->scale()).out;
        const size_t query_head = kv_head * group + g, at = i * options.query_heads + query_head;
        const auto error_of = [&](const std::vector<float>& out, size_t row) {
          return RelativeError(std::span(out).subspan(row * dim, dim), exact);
        };
        errors.full[at] = error_of(full[i].out, query_head);
        errors.ours[at] = error_of(ours[i].out, query_head);
        errors.retrieval_only[at] = error_of(retrieval_only[i].out, query_head);
        errors.paper[at] = error_of(paper.out, g);
      }
    }
  });
  return errors;
}

}  // namespace wavekv::bench
