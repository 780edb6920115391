// A random head to run a decode step over: its tokens, its index in the format of the device copy,
// and the same attention in float64.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "gpu/kernels/step_layout.h"

namespace wavekv::gpu {

// Rounds to the element type and back.
float RoundTo(Element element, float x);
uint16_t ToBits(Element element, float x);
float FromBits(Element element, uint16_t bits);

struct HeadSpec {
  std::vector<uint32_t> segment_tokens;
  uint32_t cluster_tokens_max = kClusterBlocksMax * kBlockRows;
  uint32_t sinks = 4;
  uint32_t steady = 64;         // Tokens in the ring.
  uint64_t steady_first = 100;  // Position of the first of them.
  uint32_t steady_capacity = 256;
  uint32_t retrieve = 8;
  bool spread = true;  // Whether clusters differ from their means at all.
  // Clusters of a segment that is no part of the version any more, before each of the others:
  // without sizes, and with whatever they held. Multiple of kClusterPad.
  uint32_t stale_clusters = 0;
};

struct SegmentArrays {
  std::vector<uint16_t> keys, values;  // [token_count, dim] in order of cluster
  std::vector<float> key_mean, value_mean, spread_share;
  uint32_t first_cluster = 0;
};

// Host arrays with the names of HeadDescriptor.
struct HeadProblem {
  Element element;
  uint32_t dim = 0;
  HeadSpec spec;
  std::vector<SegmentArrays> segments;
  std::vector<uint16_t> sink_keys, sink_values;      // [sinks, dim]
  std::vector<uint16_t> steady_keys, steady_values;  // [steady_capacity, dim] the ring
  std::vector<int8_t> centroids, value_means;
  std::vector<float> centroid_scales, value_scales, key_spreads, value_spreads;
  std::vector<uint16_t> sizes, cluster_segment;
  std::vector<uint32_t> first_row, first_block;
  uint32_t block_count = 0;
  uint32_t real_clusters = 0;

  uint32_t cluster_count() const { return static_cast<uint32_t>(sizes.size()); }
  // Stored centroid or value mean.
  double Centroid(uint32_t cluster, uint32_t d) const;
  double ValueMean(uint32_t cluster, uint32_t d) const;
};

HeadProblem MakeHead(std::mt19937_64& random, Element element, uint32_t dim, const HeadSpec& spec);

// Adds the token that the next step appends, at position `position` of the ring.
void AppendToRing(HeadProblem* head, uint64_t position, const std::vector<uint16_t>& key,
                  const std::vector<uint16_t>& value);

// The float64 oracle for one unit.
class StepOracle {
 public:
  // `queries` [group, dim] as given to the device; the ring ends at `steady_end`.
  StepOracle(const HeadProblem& head, std::vector<double> queries, uint32_t group, double scale,
             uint64_t steady_end);

  // [cluster_count] what selection orders by; negative for padding.
  std::vector<double> Ranks(bool by_mass) const;

  struct Output {
    std::vector<double> out;  // [group, dim]
    std::vector<double> lse;  // [group]
  };
  // Exact over the steady zone and `retrieved`, all other clusters estimated.
  Output Attend(const std::vector<uint32_t>& retrieved) const;

 private:
  double Logit(uint32_t g, uint32_t cluster) const;  // Of the centroid.
  // Deviation of the logits of the cluster's tokens about it.
  double Deviation(uint32_t g, uint32_t cluster) const;
  // Log of the estimated mass; the cluster has tokens.
  double LogMass(uint32_t g, uint32_t cluster) const;
  double Dot(uint32_t g, const uint16_t* row) const;
  std::vector<std::pair<const uint16_t*, const uint16_t*>> SteadyRows() const;

  const HeadProblem& head_;
  const std::vector<double> queries_;
  const uint32_t group_;
  const double scale_;
  const uint64_t steady_end_;
};

}  // namespace wavekv::gpu
