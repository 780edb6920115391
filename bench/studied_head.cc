#include "bench/studied_head.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "storage/base/check.h"

namespace wavekv::bench {
namespace {

void CheckOk(const absl::Status& status) {
  WAVEKV_CHECK(status.ok(), std::string(status.message()).c_str());
}

// Each cluster's share of each head's mass over the group: its sum or its largest.
std::vector<float> RankByMass(HeadIndex index, const ClusterScores& scores, RankBy by) {
  const bool sized = by == RankBy::kMassSum || by == RankBy::kMassMax;
  const bool largest = by == RankBy::kMassMax || by == RankBy::kPlainMax;
  std::vector<float> rank(scores.cluster_count, 0);
  for (uint32_t g = 0; g < scores.group_size; ++g) {
    std::vector<double> mass(scores.logits.begin() + size_t{g} * scores.cluster_count,
                             scores.logits.begin() + (size_t{g} + 1) * scores.cluster_count);
    size_t c = 0;
    for (const SegmentHead* segment : index) {
      for (const uint16_t size : segment->sizes) mass[c++] += sized ? std::log(size) : 0;
    }
    const double top = *std::max_element(mass.begin(), mass.end());
    double sum = 0;
    for (double& m : mass) sum += m = std::exp(m - top);
    for (c = 0; c < mass.size(); ++c) {
      const auto share = static_cast<float>(mass[c] / sum);
      rank[c] = largest ? std::max(rank[c], share) : rank[c] + share;
    }
  }
  return rank;
}

// The expected error of the output when a cluster is estimated, by its estimated mass.
std::vector<float> RankByEstimate(HeadIndex index, const GroupQuery& query,
                                  const ClusterScores& scores) {
  std::vector<float> rank(scores.cluster_count, 0);
  for (uint32_t g = 0; g < scores.group_size; ++g) {
    const std::span<const float> q = query.queries.subspan(size_t{g} * query.key_dim);
    const double scale_squared = double{query.scale} * query.scale;
    const float* weights = &scores.weights[size_t{g} * scores.cluster_count];
    size_t flat = 0;
    for (const SegmentHead* segment : index) {
      double seen = 0;
      for (uint32_t j = 0; j < query.key_dim; ++j) {
        seen += scale_squared * q[j] * q[j] * segment->spread_shares[j];
      }
      for (uint32_t c = 0; c < segment->cluster_count; ++c, ++flat) {
        const double share = weights[flat] * std::exp(double{scores.tops[g]} - scores.total_lse[g]);
        const double deviation = std::sqrt(-std::expm1(-seen * segment->key_spreads[c]));
        rank[flat] += static_cast<float>(share * deviation * segment->value_spreads[c]);
      }
    }
  }
  return rank;
}

double RelativeError(const PartialAttention& found, const PartialAttention& exact, uint32_t g,
                     uint32_t dim) {
  double difference = 0, norm = 0;
  for (size_t j = size_t{g} * dim; j < (size_t{g} + 1) * dim; ++j) {
    difference += std::pow(double{found.out[j]} - exact.out[j], 2);
    norm += std::pow(exact.out[j], 2);
  }
  return norm == 0 ? 0 : std::sqrt(difference / norm);
}

}  // namespace

struct StudiedHead::Step {
  GroupQuery query;
  uint64_t steady_tokens = 0, token_count = 0;
  PartialAttention steady, exact;
  ClusterScores scores;
};

StudiedHead::StudiedHead(ComputeBackend* backend, const RecordedLayer& layer, uint32_t kv_head,
                         const ClusterOptions& options)
    : backend_(backend), layer_(layer), kv_head_(kv_head), options_(options) {}

RowRun StudiedHead::Rows(uint64_t begin, uint64_t end) const {
  const size_t element = DTypeBytes(layer_.dtype);
  return {layer_.keys[kv_head_].data() + begin * layer_.key_dim * element,
          layer_.values[kv_head_].data() + begin * layer_.value_dim * element,
          static_cast<uint32_t>(end - begin)};
}

StudiedHead::Segment StudiedHead::MakeSegment(const TokenRange& range) {
  Segment segment;
  segment.range = range;
  const RowRun rows = Rows(range.begin, range.end);
  segment.keys.resize(range.size() * layer_.key_dim * DTypeBytes(layer_.dtype));
  segment.values.resize(range.size() * layer_.value_dim * DTypeBytes(layer_.dtype));
  const ClusterInput input = {range.begin,  rows.row_count, layer_.key_dim, layer_.value_dim,
                              layer_.dtype, rows.keys,      rows.values};
  auto head = backend_->ClusterSegment(input, options_, segment.keys.data(), segment.values.data());
  CheckOk(head.status());
  segment.head = *std::move(head);
  return segment;
}

void StudiedHead::Index(std::span<const TokenRange> ranges) {
  size_t kept = 0;
  while (kept < segments_.size() && kept < ranges.size() && segments_[kept].range == ranges[kept]) {
    ++kept;
  }
  segments_.resize(kept);
  for (const TokenRange& range : ranges.subspan(kept)) {
    segments_.push_back(MakeSegment(range));
  }
  index_.clear();
  for (const Segment& segment : segments_) index_.push_back(&segment.head);
  indexed_end_ = ranges.empty() ? kSinkTokens : ranges.back().end;
}

double StudiedHead::index_ratio() const {
  double index = 0, payload = 0;
  for (const Segment& segment : segments_) {
    index += static_cast<double>(segment.head.index_bytes());
    payload += static_cast<double>(segment.keys.size() + segment.values.size());
  }
  return payload == 0 ? 0 : index / payload;
}

std::vector<Outcome> StudiedHead::Answer(const RecordedQuery& query,
                                         std::span<const Policy> policies) {
  WAVEKV_CHECK(query.token_count >= indexed_end_, "a query sees all that is indexed");
  const uint32_t group = layer_.group_size();
  Step step;
  step.query = {std::span(query.queries)
                    .subspan(size_t{kv_head_} * group * layer_.key_dim, group * layer_.key_dim),
                group,
                layer_.key_dim,
                layer_.value_dim,
                layer_.dtype,
                layer_.scale};
  step.token_count = query.token_count;
  step.steady_tokens = kSinkTokens + query.token_count - indexed_end_;
  const std::vector<RowRun> all = {Rows(0, query.token_count)};
  const std::vector<RowRun> steady = {Rows(0, kSinkTokens), Rows(indexed_end_, query.token_count)};
  CheckOk(backend_->AttendRows(all, step.query, &step.exact));
  CheckOk(backend_->AttendRows(steady, step.query, &step.steady));
  CheckOk(backend_->RankClusters(index_, step.query, step.steady.lse, &step.scores));
  std::vector<Outcome> outcomes;
  for (const Policy& policy : policies) outcomes.push_back(AnswerBy(policy, step));
  return outcomes;
}

Outcome StudiedHead::AnswerBy(const Policy& policy, const Step& step) {
  const GroupQuery& query = step.query;
  const uint64_t row_bytes =
      (uint64_t{layer_.key_dim} + layer_.value_dim) * DTypeBytes(layer_.dtype);
  ClusterScores scores = step.scores;
  if (policy.rank == RankBy::kEstimateGain) {
    scores.rank = RankByEstimate(index_, query, scores);
  } else if (policy.rank != RankBy::kExpectedError) {
    scores.rank = RankByMass(index_, scores, policy.rank);
  }
  const auto plan = backend_->SelectZones(index_, query, scores, step.steady.lse, policy.budget);
  CheckOk(plan.status());
  PartialAttention answer = step.steady, seen = step.steady, part;
  EstimatedAttention estimate;
  Outcome outcome;
  outcome.bytes_full = step.token_count * row_bytes;
  outcome.bytes_read = step.steady_tokens * row_bytes;
  for (const SegmentHead* segment : index_) outcome.bytes_read += segment->rank_read_bytes();
  for (const uint32_t c : plan->retrieved) {
    outcome.bytes_read += ClusterRows(index_, c).row_count * row_bytes;
  }
  if (!plan->retrieved.empty()) {
    CheckOk(backend_->AttendClusters(index_, plan->retrieved, query, &part));
    MergePartial(part, &answer);
    MergePartial(part, &seen);
  }
  if (!plan->sketched.empty()) {
    CheckOk(backend_->SketchClusters(index_, plan->sketched, query, scores, false, &estimate));
    MergePartial(estimate.attention, &answer);
    outcome.bytes_read += estimate.bytes_read;
    CheckOk(backend_->AttendClusters(index_, plan->sketched, query, &part));
    MergePartial(part, &seen);
  }
  if (!plan->estimated.empty() && policy.plain_estimate) {
    MergePartial(EstimatePlainly(plan->estimated, step), &answer);
    outcome.bytes_read += plan->estimated.size() * (layer_.value_dim + sizeof(float));
  } else if (!plan->estimated.empty()) {
    CheckOk(backend_->EstimateClusters(index_, plan->estimated, query, scores, false, &estimate));
    MergePartial(estimate.attention, &answer);
    outcome.bytes_read += estimate.bytes_read;
  }
  outcome.retrieved = static_cast<uint32_t>(plan->retrieved.size());
  outcome.met = plan->error_budget_met;
  outcome.capped = plan->error_budget_capped;
  for (uint32_t g = 0; g < query.group_size; ++g) {
    outcome.errors.push_back(RelativeError(answer, step.exact, g, layer_.value_dim));
    outcome.covered.push_back(std::exp(double{seen.lse[g]} - step.exact.lse[g]));
  }
  return outcome;
}

PartialAttention StudiedHead::EstimatePlainly(std::span<const uint32_t> clusters,
                                              const Step& step) const {
  PartialAttention result;
  const uint32_t dim = layer_.value_dim;
  for (uint32_t g = 0; g < step.query.group_size; ++g) {
    const float* logits = &step.scores.logits[size_t{g} * step.scores.cluster_count];
    double top = -std::numeric_limits<double>::infinity(), total = 0;
    for (const uint32_t c : clusters) top = std::max<double>(top, logits[c]);
    std::vector<double> out(dim, 0);
    for (const uint32_t c : clusters) {
      const auto [segment_idx, cluster_idx] = LocateCluster(index_, c);
      const SegmentHead& segment = *index_[segment_idx];
      const double weight = segment.sizes[cluster_idx] * std::exp(logits[c] - top);
      total += weight;
      const int8_t* codes = &segment.value_codes[size_t{cluster_idx} * dim];
      for (uint32_t j = 0; j < dim; ++j) {
        const double deviation = double{segment.value_scales[cluster_idx]} * codes[j];
        out[j] += weight * (segment.value_mean[j] + deviation);
      }
    }
    for (const double x : out) result.out.push_back(static_cast<float>(x / total));
    result.lse.push_back(static_cast<float>(top + std::log(total)));
  }
  return result;
}

}  // namespace wavekv::bench
