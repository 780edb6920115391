#include "index/backend/cpu_sketch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "index/zone/cluster_mass.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// A token below this share of every head's mass counts with its cluster's mean value; one above
// the other of any head's is read exactly. On a real model's heads the first spares most values and
// the second costs a few rows: docs/decisions/011-token-sketch.md.
constexpr float kValueShareMin = 1e-4f;
constexpr float kExactShareMin = 0.005f;

// Rows of the clusters, one after the other.
struct SketchedRows {
  uint32_t group_size = 0;
  size_t row_count = 0;
  std::vector<float> scores;    // [group_size, row_count]
  std::vector<float> weights;   // [group_size, row_count] exp(score - peak)
  std::vector<float> peaks;     // [group_size]
  std::vector<float> sums;      // [group_size] of weights
  std::vector<uint32_t> heavy;  // Rows, ascending, whose key and value are read exactly.

  float* Scores(uint32_t g) { return scores.data() + size_t{g} * row_count; }
  const float* Weights(uint32_t g) const { return weights.data() + size_t{g} * row_count; }

  // Weights from the scores.
  void Weigh(const simd::Kernels& kernels) {
    weights = scores;
    peaks.clear();
    sums.clear();
    for (uint32_t g = 0; g < group_size; ++g) {
      float* const head = weights.data() + size_t{g} * row_count;
      peaks.push_back(kernels.max(head, row_count));
      sums.push_back(kernels.exp_sum(head, row_count, peaks.back()));
    }
  }

  // The weight of that share of each head's mass, [group_size]. The mass was estimated when the
  // clusters were ranked; what is known now may be more.
  std::vector<float> WeightsOfShare(float share, const ClusterScores& ranked) const {
    std::vector<float> thresholds;
    for (uint32_t g = 0; g < group_size; ++g) {
      const float whole = std::max(ranked.total_lse[g] - peaks[g], std::log(sums[g]));
      thresholds.push_back(share * std::exp(whole));
    }
    return thresholds;
  }

  bool IsAbove(const std::vector<float>& thresholds, size_t row) const {
    for (uint32_t g = 0; g < group_size; ++g) {
      if (Weights(g)[row] > thresholds[g]) return true;
    }
    return false;
  }
};

SketchedRows ScoreSketches(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
                           const GroupQuery& query, const ClusterScores& ranked) {
  SketchedRows rows;
  rows.group_size = query.group_size;
  for (const EstimatedCluster& cluster : clusters) {
    rows.row_count += cluster.segment->sizes[cluster.cluster_idx];
  }
  rows.scores.resize(rows.row_count * query.group_size);
  const size_t row_bytes = SketchRowBytes(query.key_dim);
  size_t first = 0;
  for (const EstimatedCluster& cluster : clusters) {
    const SegmentHead& segment = *cluster.segment;
    const size_t row = segment.first_row[cluster.cluster_idx];
    const size_t size = segment.sizes[cluster.cluster_idx];
    for (uint32_t g = 0; g < query.group_size; ++g) {
      std::fill_n(rows.Scores(g) + first, size,
                  ranked.logits[size_t{g} * ranked.cluster_count + cluster.flat_idx]);
    }
    kernels.add_code_dots(query.queries.data(), query.group_size, query.key_dim,
                          segment.sketch.keys.codes.data() + row * row_bytes,
                          segment.sketch.keys.steps.data() + row, size, query.scale,
                          rows.scores.data() + first, rows.row_count);
    first += size;
  }
  rows.Weigh(kernels);
  return rows;
}

// Scores the heavy rows by their keys. There are at most 1 / kExactShareMin for each query head.
void ScoreHeavyRows(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
                    const GroupQuery& query, const ClusterScores& ranked, SketchedRows* rows) {
  const std::vector<float> thresholds = rows->WeightsOfShare(kExactShareMin, ranked);
  size_t first = 0;
  for (const EstimatedCluster& cluster : clusters) {
    const SegmentHead& segment = *cluster.segment;
    const size_t size = segment.sizes[cluster.cluster_idx];
    for (size_t r = 0; r < size; ++r) {
      if (!rows->IsAbove(thresholds, first + r)) continue;
      rows->heavy.push_back(static_cast<uint32_t>(first + r));
      const RowRun row = RowsOf(segment, segment.first_row[cluster.cluster_idx] + r, 1);
      kernels.dot_rows(query.payload_dtype, query.queries.data(), query.group_size, query.key_dim,
                       row.keys, 1, query.scale, rows->scores.data() + first + r, rows->row_count);
    }
    first += size;
  }
  if (!rows->heavy.empty()) rows->Weigh(kernels);
}

// Sums of weight times value, [group_size, value_dim]; counts the sketched values that were read.
class ValueSums {
 public:
  ValueSums(const simd::Kernels& kernels, const GroupQuery& query, const SketchedRows& rows,
            const ClusterScores& ranked)
      : kernels_(kernels),
        query_(query),
        rows_(rows),
        thresholds_(rows.WeightsOfShare(kValueShareMin, ranked)),
        sums_(size_t{query.group_size} * query.value_dim, 0.0f) {}

  // The clusters in the order of the rows.
  void Add(const EstimatedCluster& cluster) {
    const SegmentHead& segment = *cluster.segment;
    const size_t row = segment.first_row[cluster.cluster_idx];
    const size_t size = segment.sizes[cluster.cluster_idx];
    std::vector<float> mean_weights(query_.group_size, 0.0f);
    for (size_t r = 0; r < size; ++r, ++next_) {
      if (heavy_ < rows_.heavy.size() && rows_.heavy[heavy_] == next_) {
        ++heavy_;
        AddExact(RowsOf(segment, row + r, 1));
        continue;
      }
      for (uint32_t g = 0; g < query_.group_size; ++g) mean_weights[g] += rows_.Weights(g)[next_];
      if (rows_.IsAbove(thresholds_, next_)) AddSketch(segment.sketch.values, row + r);
    }
    AddMean(segment, cluster.cluster_idx, &mean_weights);
  }

  std::vector<float> Take() { return std::move(sums_); }
  size_t sketched_values() const { return sketched_values_; }

 private:
  // The stored value mean, for each head `weights` [group_size] times; overwrites the weights.
  void AddMean(const SegmentHead& segment, uint32_t cluster, std::vector<float>* weights) {
    kernels_.accumulate_rows(DType::kF32, segment.value_mean.data(), 1, query_.value_dim,
                             weights->data(), 1, query_.group_size, sums_.data(), query_.value_dim);
    for (float& weight : *weights) weight *= segment.value_scales[cluster];
    kernels_.accumulate_means(segment.value_codes.data(), &cluster, 1, query_.value_dim,
                              weights->data(), 1, query_.group_size, sums_.data(),
                              query_.value_dim);
  }

  void AddExact(const RowRun& row) {
    kernels_.accumulate_rows(query_.payload_dtype, row.values, 1, query_.value_dim,
                             rows_.weights.data() + next_, rows_.row_count, query_.group_size,
                             sums_.data(), query_.value_dim);
  }

  void AddSketch(const RowCodes& values, size_t row) {
    ++sketched_values_;
    kernels_.accumulate_codes(values.codes.data() + row * SketchRowBytes(query_.value_dim),
                              values.steps[row], query_.value_dim, rows_.weights.data() + next_,
                              rows_.row_count, query_.group_size, sums_.data(), query_.value_dim);
  }

  const simd::Kernels& kernels_;
  const GroupQuery& query_;
  const SketchedRows& rows_;
  const std::vector<float> thresholds_;
  std::vector<float> sums_;
  size_t next_ = 0;   // Row.
  size_t heavy_ = 0;  // Heavy rows behind.
  size_t sketched_values_ = 0;
};

// The cluster's weight for head `g`, a sum in order.
float WeightOf(const SketchedRows& rows, uint32_t g, size_t first, size_t size) {
  float sum = 0;
  for (size_t r = first; r < first + size; ++r) sum += rows.Weights(g)[r];
  return sum;
}

// A token's score differs from that of its sketched key by at most reach times the sketch's error
// (of a heavy row not at all), and that from what was computed by its rounding. The summary's
// bounds hold as well.
LogMassBounds BoundSketch(const EstimatedCluster& cluster, float weight, float peak, float logit,
                          double reach) {
  const SegmentHead& segment = *cluster.segment;
  const uint32_t c = cluster.cluster_idx;
  const double error = segment.sketch.key_errors[c];
  const double centroid_slack = ScoreSlack(segment, reach);
  const LogMassBounds summary = BoundLogMass(logit, segment.sizes[c], segment.deltas[c],
                                             segment.radii[c], reach, centroid_slack);
  const double slack = reach * error + centroid_slack +
                       SumSlack(segment.key_dim, reach, segment.radii[c] + error) + kSumSlack;
  // What a weight lost to underflow is less than the smallest normal number.
  constexpr double kLost = 2.0 * std::numeric_limits<float>::min();
  return {std::max(summary.lower, peak + std::log(static_cast<double>(weight)) - slack),
          std::min(summary.upper, peak + std::log(weight + kLost * segment.sizes[c]) + slack)};
}

void BoundRows(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
               std::span<const double> reaches, const ClusterScores& scores,
               const SketchedRows& rows, EstimatedAttention* result) {
  std::vector<double> lower_terms(clusters.size()), upper_terms(clusters.size());
  for (uint32_t g = 0; g < rows.group_size; ++g) {
    size_t first = 0;
    for (size_t i = 0; i < clusters.size(); ++i) {
      const size_t size = clusters[i].segment->sizes[clusters[i].cluster_idx];
      const LogMassBounds bounds = BoundSketch(
          clusters[i], WeightOf(rows, g, first, size), rows.peaks[g],
          scores.logits[size_t{g} * scores.cluster_count + clusters[i].flat_idx], reaches[g]);
      lower_terms[i] = bounds.lower;
      upper_terms[i] = bounds.upper;
      first += size;
    }
    AppendBounds(kernels, lower_terms, upper_terms, &result->lse_lower, &result->lse_upper);
  }
}

}  // namespace

void SketchOutput(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
                  const GroupQuery& query, std::span<const double> reaches,
                  const ClusterScores& scores, bool bounds, EstimatedAttention* result) {
  for (const EstimatedCluster& cluster : clusters) {
    WAVEKV_CHECK(!cluster.segment->sketch.empty(), "sketched clusters have a sketch");
  }
  SketchedRows rows = ScoreSketches(kernels, clusters, query, scores);
  ScoreHeavyRows(kernels, clusters, query, scores, &rows);
  ValueSums values(kernels, query, rows, scores);
  for (const EstimatedCluster& cluster : clusters) values.Add(cluster);
  PartialAttention& attention = result->attention;
  attention.out = values.Take();
  attention.lse.clear();
  for (uint32_t g = 0; g < query.group_size; ++g) {
    const float sum = rows.sums[g];
    attention.lse.push_back(sum > 0 ? rows.peaks[g] + std::log(sum) : rows.peaks[g]);
    if (sum > 0) {
      kernels.scale(attention.out.data() + size_t{g} * query.value_dim, query.value_dim, 1 / sum);
    }
  }
  result->bytes_read =
      clusters.size() * (query.value_dim + sizeof(float)) +
      rows.row_count * (SketchRowBytes(query.key_dim) + sizeof(uint16_t)) +
      values.sketched_values() * (SketchRowBytes(query.value_dim) + sizeof(uint16_t)) +
      rows.heavy.size() * (query.key_dim + query.value_dim) * DTypeBytes(query.payload_dtype);
  result->lse_lower.clear();
  result->lse_upper.clear();
  if (bounds) BoundRows(kernels, clusters, reaches, scores, rows, result);
}

}  // namespace wavekv
