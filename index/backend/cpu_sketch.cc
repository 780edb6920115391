#include "index/backend/cpu_sketch.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "index/backend/fetch_ahead.h"
#include "index/zone/cluster_mass.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// A token below this share of every head's mass counts with its cluster's mean value; one above
// the other of any head's is read exactly. On a real model's heads the first spares most values and
// the second costs a few rows: docs/decisions/011-token-sketch.md.
constexpr float kValueShareMin = 1e-4f;
constexpr float kExactShareMin = 0.002f;

// Clusters lie anywhere: the pages of all that will be read of them are asked for first.
void FetchPagesOf(std::span<const EstimatedCluster> clusters, const GroupQuery& query) {
  for (const EstimatedCluster& cluster : clusters) {
    const SegmentHead& segment = *cluster.segment;
    const size_t first = cluster.first_row(), count = cluster.row_count();
    const auto fetch_codes = [=](const RowCodes& rows, size_t row_bytes) {
      FetchPages(rows.codes.data() + first * row_bytes, count * row_bytes);
      FetchPages(rows.steps.data() + first, count * sizeof(rows.steps[0]));
    };
    fetch_codes(segment.sketch.keys, SketchRowBytes(query.key_dim));
    fetch_codes(segment.sketch.values, SketchRowBytes(query.value_dim));
    FetchPages(segment.value_codes.data() + size_t{cluster.cluster_idx} * query.value_dim,
               query.value_dim);
    FetchPages(segment.value_scales.data() + cluster.cluster_idx, sizeof(float));
  }
}

// Clusters between the one whose codes are at work and the one whose are requested.
constexpr size_t kAheadClusters = 8;

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

  // The rows with at least that share of some head's mass, ascending.
  std::vector<uint32_t> RowsOfShare(const simd::Kernels& kernels, float share,
                                    const ClusterScores& ranked) const {
    const std::vector<float> thresholds = WeightsOfShare(share, ranked);
    std::vector<uint32_t> listed(row_count);
    listed.resize(kernels.list_reaching(weights.data(), row_count, group_size, thresholds.data(),
                                        row_count, listed.data()));
    return listed;
  }
};

SketchedRows ScoreSketches(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
                           const GroupQuery& query, const ClusterScores& ranked) {
  SketchedRows rows;
  rows.group_size = query.group_size;
  for (const EstimatedCluster& cluster : clusters) {
    rows.row_count += cluster.row_count();
  }
  rows.scores.resize(rows.row_count * query.group_size);
  const size_t row_bytes = SketchRowBytes(query.key_dim);
  FetchAhead codes_ahead(clusters, kAheadClusters, [=](const EstimatedCluster& cluster) {
    const RowCodes& keys = cluster.segment->sketch.keys;
    const size_t first = cluster.first_row(), count = cluster.row_count();
    FetchBytes(keys.codes.data() + first * row_bytes, count * row_bytes);
    FetchBytes(keys.steps.data() + first, count * sizeof(keys.steps[0]));
  });
  size_t first = 0;
  for (const EstimatedCluster& cluster : clusters) {
    const SegmentHead& segment = *cluster.segment;
    const size_t row = cluster.first_row(), size = cluster.row_count();
    codes_ahead.Next();
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
  rows->heavy = rows->RowsOfShare(kernels, kExactShareMin, ranked);
  if (rows->heavy.empty()) return;
  std::vector<RowRun> runs;
  runs.reserve(rows->heavy.size());
  auto cluster = clusters.begin();
  size_t first = 0;  // Row of the cluster's first.
  for (const uint32_t row : rows->heavy) {
    for (; row - first >= cluster->row_count(); ++cluster) first += cluster->row_count();
    runs.push_back(RowsOf(*cluster->segment, cluster->first_row() + row - first, 1));
    FetchPages(runs.back().keys, 1);
    FetchPages(runs.back().values, 1);
  }
  for (const RowRun& run : runs) {
    FetchBytes(run.keys, query.key_dim * DTypeBytes(query.payload_dtype));
    FetchBytes(run.values, query.value_dim * DTypeBytes(query.payload_dtype));
  }
  for (size_t i = 0; i < runs.size(); ++i) {
    kernels.dot_rows(query.payload_dtype, query.queries.data(), query.group_size, query.key_dim,
                     runs[i].keys, 1, query.scale, rows->scores.data() + rows->heavy[i],
                     rows->row_count);
  }
  rows->Weigh(kernels);
}

// Sums of weight times value, [group_size, value_dim]; counts the sketched values that were read.
class ValueSums {
 public:
  ValueSums(const simd::Kernels& kernels, const GroupQuery& query, const SketchedRows& rows,
            const ClusterScores& ranked)
      : kernels_(kernels),
        query_(query),
        rows_(rows),
        code_bytes_(SketchRowBytes(query.value_dim)),
        read_(rows.RowsOfShare(kernels, kValueShareMin, ranked)),
        mean_weights_(query.group_size),
        segment_weights_(query.group_size, 0.0f),
        sums_(size_t{query.group_size} * query.value_dim, 0.0f) {}

  // In the order of the rows.
  void Add(std::span<const EstimatedCluster> clusters) {
    FetchAhead codes_ahead(
        clusters, kAheadClusters,
        [this, read = read_.begin(), first = size_t{0}](const EstimatedCluster& cluster) mutable {
          const RowCodes& values = cluster.segment->sketch.values;
          const size_t row = cluster.first_row(), end = first + cluster.row_count();
          if (read != read_.end() && *read < end) {
            FetchBytes(&values.steps[row], cluster.row_count() * sizeof(values.steps[0]));
          }
          for (; read != read_.end() && *read < end; ++read) {
            FetchBytes(values.codes.data() + (row + *read - first) * code_bytes_, code_bytes_);
          }
          first = end;
        });
    for (const EstimatedCluster& cluster : clusters) {
      if (cluster.segment != segment_) AddMeans();
      segment_ = cluster.segment;
      codes_ahead.Next();
      AddCluster(cluster);
    }
    AddMeans();
  }

  std::vector<float> Take() { return std::move(sums_); }
  size_t sketched_values() const { return sketched_values_; }

 private:
  // All but the cluster's mean value, which waits for the others of the segment.
  void AddCluster(const EstimatedCluster& cluster) {
    const size_t row = cluster.first_row(), size = cluster.row_count();
    std::fill(mean_weights_.begin(), mean_weights_.end(), 0.0f);
    listed_.clear();
    for (size_t r = 0; r < size; ++r, ++next_) {
      const bool is_read = IsNext(read_, &next_read_);
      if (IsNext(rows_.heavy, &next_heavy_)) {
        AddExact(RowsOf(*cluster.segment, row + r, 1));
        continue;
      }
      for (uint32_t g = 0; g < query_.group_size; ++g) mean_weights_[g] += rows_.Weights(g)[next_];
      if (is_read) listed_.push_back(static_cast<uint32_t>(r));
    }
    AddCodes(cluster);
    means_.push_back(cluster.cluster_idx);
    const size_t clusters = cluster.segment->cluster_count;
    scaled_mean_weights_.resize(query_.group_size * clusters);
    for (uint32_t g = 0; g < query_.group_size; ++g) {
      segment_weights_[g] += mean_weights_[g];
      scaled_mean_weights_[g * clusters + cluster.cluster_idx] =
          mean_weights_[g] * cluster.segment->value_scales[cluster.cluster_idx];
    }
  }

  // Whether the row at work is the next of `list`, which then goes on.
  bool IsNext(const std::vector<uint32_t>& list, size_t* at) const {
    if (*at == list.size() || list[*at] != next_) return false;
    ++*at;
    return true;
  }

  void AddExact(const RowRun& row) {
    kernels_.accumulate_rows(query_.payload_dtype, row.values, 1, query_.value_dim,
                             rows_.weights.data() + next_, rows_.row_count, query_.group_size,
                             sums_.data(), query_.value_dim);
  }

  // The sketched values of the listed rows of the cluster, which is the last behind.
  void AddCodes(const EstimatedCluster& cluster) {
    if (listed_.empty()) return;
    sketched_values_ += listed_.size();
    const RowCodes& values = cluster.segment->sketch.values;
    const size_t row = cluster.first_row(), size = cluster.row_count();
    code_weights_.resize(query_.group_size * size);
    for (uint32_t g = 0; g < query_.group_size; ++g) {
      const float* const weights = rows_.Weights(g) + next_ - size;
      for (size_t r = 0; r < size; ++r) {
        code_weights_[g * size + r] = weights[r] * BF16ToFloat(values.steps[row + r]);
      }
    }
    kernels_.accumulate_codes(values.codes.data() + row * code_bytes_, listed_.data(),
                              listed_.size(), query_.value_dim, code_weights_.data(), size,
                              query_.group_size, sums_.data(), query_.value_dim);
  }

  // The mean values of the clusters that wait.
  void AddMeans() {
    if (means_.empty()) return;
    kernels_.accumulate_rows(DType::kF32, segment_->value_mean.data(), 1, query_.value_dim,
                             segment_weights_.data(), 1, query_.group_size, sums_.data(),
                             query_.value_dim);
    kernels_.accumulate_means(segment_->value_codes.data(), means_.data(), means_.size(),
                              query_.value_dim, scaled_mean_weights_.data(),
                              segment_->cluster_count, query_.group_size, sums_.data(),
                              query_.value_dim);
    means_.clear();
    std::fill(segment_weights_.begin(), segment_weights_.end(), 0.0f);
  }

  const simd::Kernels& kernels_;
  const GroupQuery& query_;
  const SketchedRows& rows_;
  const size_t code_bytes_;           // Of a value's row.
  const std::vector<uint32_t> read_;  // Rows whose values matter, ascending.
  size_t next_ = 0;                   // Row.
  size_t next_read_ = 0;
  size_t next_heavy_ = 0;
  std::vector<uint32_t> listed_;     // Rows of the cluster whose sketched values are read.
  std::vector<float> code_weights_;  // [group_size, rows of the cluster] times the rows' steps
  std::vector<float> mean_weights_;  // [group_size] of the cluster's mean value
  const SegmentHead* segment_ = nullptr;
  std::vector<uint32_t> means_;             // Clusters of the segment that wait.
  std::vector<float> segment_weights_;      // [group_size] of the segment's mean value
  std::vector<float> scaled_mean_weights_;  // [group_size, clusters] of the means' codes
  std::vector<float> sums_;
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
      const size_t size = clusters[i].row_count();
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
  FetchPagesOf(clusters, query);
  SketchedRows rows = ScoreSketches(kernels, clusters, query, scores);
  ScoreHeavyRows(kernels, clusters, query, scores, &rows);
  ValueSums values(kernels, query, rows, scores);
  values.Add(clusters);
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
