#include "index/backend/cpu_estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/backend/cpu_rank.h"
#include "index/backend/fetch_ahead.h"
#include "index/zone/cluster_mass.h"
#include "index/zone/round_outwards.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr size_t kSumChunk = 512;

// log(sum of exp(terms)).
double LogSumExp(const simd::Kernels& kernels, const std::vector<double>& terms) {
  double top = -kInfinity;
  for (const double term : terms) top = std::max(top, term);
  if (!std::isfinite(top)) return top;
  std::vector<float> chunk;
  chunk.reserve(kSumChunk);
  double sum = 0;
  for (size_t first = 0; first < terms.size(); first += kSumChunk) {
    const size_t end = std::min(terms.size(), first + kSumChunk);
    chunk.clear();
    for (size_t i = first; i < end; ++i) chunk.push_back(static_cast<float>(terms[i] - top));
    sum += kernels.exp_sum(chunk.data(), chunk.size(), 0);
  }
  return top + std::log(sum);
}

// Below this the float weights of a zone have lost digits to underflow.
constexpr double kMassMin = 1e-20;

// The masses of a zone's clusters.
class ZoneMasses {
 public:
  ZoneMasses(const simd::Kernels& kernels, HeadIndex index, std::span<const uint32_t> clusters,
             const GroupQuery& query, const ClusterScores& scores)
      : kernels_(kernels),
        index_(index),
        clusters_(scores.cluster_count),
        group_size_(query.group_size),
        weights_(scores.weights.data()),
        tops_(scores.tops) {
    mask_.assign(clusters_, 0);
    for (const uint32_t c : clusters) {
      WAVEKV_CHECK(c < clusters_, "a flat cluster index below ClusterCount");
      mask_[c] = 1;
    }
    segment_mass_.resize(index.size() * group_size_);
    mass_.assign(group_size_, 0);
    for (uint32_t g = 0; g < group_size_; ++g) {
      SumHead(g);
      if (mass_[g] < kMassMin && !clusters.empty()) {
        WeighAnew(query, scores, g);
        SumHead(g);
      }
    }
  }

  // [clusters] of head g, in units of exp(top(g)), whether they belong to the zone or not.
  const float* weights() const { return weights_; }
  float top(uint32_t g) const { return tops_[g]; }
  double mass(uint32_t g) const { return mass_[g]; }
  float segment_mass(size_t segment_idx, uint32_t g) const {
    return segment_mass_[segment_idx * group_size_ + g];
  }

  // Each cluster's share of the zone, summed over the group; 0 outside of the zone.
  std::span<const float> Shares() {
    std::vector<float> factors(group_size_);
    for (uint32_t g = 0; g < group_size_; ++g) {
      factors[g] = mass_[g] > 0 ? static_cast<float>(1 / mass_[g]) : 0;
    }
    shares_.resize(clusters_);
    kernels_.combine(weights_, clusters_, group_size_, factors.data(), mask_.data(), clusters_,
                     shares_.data());
    return shares_;
  }

 private:
  void SumHead(uint32_t g) {
    mass_[g] = 0;
    uint32_t first = 0;
    for (size_t s = 0; s < index_.size(); ++s) {
      const float sum = kernels_.dot(mask_.data() + first, weights_ + size_t{g} * clusters_ + first,
                                     index_[s]->cluster_count);
      segment_mass_[s * group_size_ + g] = sum;
      mass_[g] += sum;
      first += index_[s]->cluster_count;
    }
  }

  // In units of the zone's own largest: it is far below the clusters' outside of it.
  void WeighAnew(const GroupQuery& query, const ClusterScores& scores, uint32_t g) {
    if (own_weights_.empty()) {
      own_weights_.assign(weights_, weights_ + size_t{group_size_} * clusters_);
      weights_ = own_weights_.data();
    }
    const size_t first = size_t{g} * clusters_;
    const GroupQuery head = {query.queries.subspan(size_t{g} * query.key_dim, query.key_dim),
                             1,
                             query.key_dim,
                             query.value_dim,
                             query.payload_dtype,
                             query.scale};
    float* const weights = own_weights_.data() + first;
    EstimateLogMasses(kernels_, index_, clusters_, ReachSquares(kernels_, index_, head),
                      scores.logits.data() + first, weights, std::span(tops_).subspan(g, 1));
    float top = -std::numeric_limits<float>::infinity();
    for (uint32_t c = 0; c < clusters_; ++c) {
      if (mask_[c] == 0) weights[c] = -std::numeric_limits<float>::infinity();
      top = std::max(top, weights[c]);
    }
    kernels_.exp_sum(weights, clusters_, top);
    tops_[g] = top;
  }

  const simd::Kernels& kernels_;
  const HeadIndex index_;
  const uint32_t clusters_;
  const uint32_t group_size_;
  const float* weights_;  // The scores' or own_weights_.
  std::vector<float> tops_;
  std::vector<float> mask_;          // [clusters] 1 in the zone
  std::vector<float> segment_mass_;  // [segments, group_size] in units of exp(top)
  std::vector<double> mass_;         // [group_size]
  std::vector<float> own_weights_;
  std::vector<float> shares_;
};

// The largest of a few thresholds below which clusters hold at most kUnreadShareMax together.
float ReadThreshold(const simd::Kernels& kernels, std::span<const float> shares,
                    size_t cluster_count) {
  constexpr size_t kSteps = 10;
  float thresholds[kSteps], sums[kSteps] = {};
  // The first always holds: no share that it leaves out is above it.
  double threshold = kUnreadShareMax / static_cast<double>(std::max<size_t>(cluster_count, 1));
  for (float& t : thresholds) {
    t = static_cast<float>(threshold);
    threshold *= 2;
  }
  kernels.sums_below(shares.data(), shares.size(), thresholds, kSteps, sums);
  size_t best = 0;
  // A float sum of so many terms may be a little low.
  while (best + 1 < kSteps && sums[best + 1] * 1.01 <= kUnreadShareMax) ++best;
  return thresholds[best];
}

// Value means worth reading, of one segment at a time.
struct ReadTile {
  std::vector<uint32_t> rows;  // Clusters of the segment.
  std::vector<float> weights;  // [group_size, clusters] times the clusters' scales
};

// Adds the deviations of the segment's value means whose share reaches the threshold. Returns how
// many were read.
size_t AddDeviations(const simd::Kernels& kernels, const SegmentHead& segment, uint32_t first,
                     std::span<const float> shares, float threshold, const ZoneMasses& masses,
                     uint32_t group_size, ReadTile* tile, float* numerators) {
  const uint32_t clusters = segment.cluster_count;
  tile->rows.resize(clusters);
  const size_t count = kernels.list_reaching(shares.data() + first, shares.size(), 1, &threshold,
                                             clusters, tile->rows.data());
  tile->weights.resize(size_t{group_size} * clusters);
  for (uint32_t g = 0; g < group_size; ++g) {
    const float* const weights = masses.weights() + size_t{g} * shares.size() + first;
    const float* const scales = segment.value_scales.data();
    float* const out = tile->weights.data() + size_t{g} * clusters;
    for (uint32_t c = 0; c < clusters; ++c) out[c] = weights[c] * scales[c];
  }
  kernels.accumulate_means(segment.value_codes.data(), tile->rows.data(), count, segment.value_dim,
                           tile->weights.data(), clusters, group_size, numerators,
                           segment.value_dim);
  return count;
}

}  // namespace

std::vector<EstimatedCluster> LocateEstimated(HeadIndex index, std::span<const uint32_t> clusters) {
  std::vector<EstimatedCluster> located;
  located.reserve(clusters.size());
  size_t segment_idx = 0;
  uint32_t first = 0;  // Flat index of the segment's first cluster.
  for (const uint32_t cluster : clusters) {
    WAVEKV_CHECK(cluster >= first, "estimated clusters ascend");
    while (segment_idx < index.size() && cluster - first >= index[segment_idx]->cluster_count) {
      first += index[segment_idx++]->cluster_count;
    }
    WAVEKV_CHECK(segment_idx < index.size(), "a flat cluster index below ClusterCount");
    located.push_back({index[segment_idx], cluster - first, cluster});
    FetchBytes(&index[segment_idx]->first_row[cluster - first], 2 * sizeof(uint32_t));
  }
  return located;
}

void EstimateOnCpu(const simd::Kernels& kernels, HeadIndex index,
                   std::span<const uint32_t> clusters, const GroupQuery& query,
                   const ClusterScores& scores, EstimatedAttention* result) {
  const uint32_t group_size = query.group_size, value_dim = query.value_dim;
  result->attention.out.assign(size_t{group_size} * value_dim, 0);
  result->attention.lse.assign(group_size, -std::numeric_limits<float>::infinity());
  result->bytes_read = 0;
  if (clusters.empty()) return;
  ZoneMasses masses(kernels, index, clusters, query, scores);
  const std::span<const float> shares = masses.Shares();
  const float threshold = ReadThreshold(kernels, shares, clusters.size());
  ReadTile tile;
  float* const numerators = result->attention.out.data();
  FetchAhead means_ahead(index, 1, [](const SegmentHead* segment) {
    FetchPages(segment->value_codes.data(), segment->value_codes.size());
    FetchBytes(segment->value_scales.data(), segment->value_scales.size() * sizeof(float));
  });
  uint32_t first = 0;
  for (size_t s = 0; s < index.size(); ++s) {
    means_ahead.Next();
    const SegmentHead& segment = *index[s];
    const size_t read = AddDeviations(kernels, segment, first, shares, threshold, masses,
                                      group_size, &tile, numerators);
    for (uint32_t g = 0; g < group_size; ++g) {
      for (uint32_t j = 0; j < value_dim; ++j) {
        numerators[size_t{g} * value_dim + j] += masses.segment_mass(s, g) * segment.value_mean[j];
      }
    }
    result->bytes_read += read * (value_dim + sizeof(float)) + value_dim * sizeof(float);
    first += segment.cluster_count;
  }
  for (uint32_t g = 0; g < group_size; ++g) {
    if (!(masses.mass(g) > 0)) continue;
    result->attention.lse[g] = static_cast<float>(masses.top(g) + std::log(masses.mass(g)));
    kernels.scale(numerators + size_t{g} * value_dim, value_dim,
                  static_cast<float>(1 / masses.mass(g)));
  }
}

void BoundEstimate(const simd::Kernels& kernels, std::span<const EstimatedCluster> clusters,
                   std::span<const double> reaches, const ClusterScores& scores,
                   std::vector<float>* lower, std::vector<float>* upper) {
  lower->clear();
  upper->clear();
  std::vector<double> lower_terms(clusters.size()), upper_terms(clusters.size());
  for (uint32_t g = 0; g < scores.group_size; ++g) {
    const float* logits = scores.logits.data() + size_t{g} * scores.cluster_count;
    const SegmentHead* segment = nullptr;
    double slack = 0;
    for (size_t i = 0; i < clusters.size(); ++i) {
      const EstimatedCluster& cluster = clusters[i];
      if (cluster.segment != segment) {
        segment = cluster.segment;
        slack = ScoreSlack(*segment, reaches[g]);
      }
      const uint32_t c = cluster.cluster_idx;
      const LogMassBounds bounds =
          BoundLogMass(logits[cluster.flat_idx], segment->sizes[c], segment->deltas[c],
                       segment->radii[c], reaches[g], slack);
      lower_terms[i] = bounds.lower;
      upper_terms[i] = bounds.upper;
    }
    AppendBounds(kernels, lower_terms, upper_terms, lower, upper);
  }
}

void AppendBounds(const simd::Kernels& kernels, const std::vector<double>& lower_terms,
                  const std::vector<double>& upper_terms, std::vector<float>* lower,
                  std::vector<float>* upper) {
  lower->push_back(RoundDown(LogSumExp(kernels, lower_terms) - kSumSlack));
  upper->push_back(RoundUp(LogSumExp(kernels, upper_terms) + kSumSlack));
}

}  // namespace wavekv
