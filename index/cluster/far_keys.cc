#include "index/cluster/far_keys.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>

#include "index/cluster/distance.h"

namespace wavekv {
namespace {

constexpr int kTwoMeansRounds = 3;
// A dimension in which clusters hardly spread is not blown up beyond this share of the mean.
constexpr double kSpreadMin = 0.01;

// Points of one segment.
struct Points {
  std::span<const float> values;
  uint32_t dim = 0;

  const float* row(uint32_t member) const { return &values[size_t{member} * dim]; }

  double SquaredDistance(uint32_t member, const std::vector<double>& centre) const {
    return wavekv::SquaredDistance(row(member), centre.data(), dim);
  }

  std::vector<double> Mean(std::span<const uint32_t> members) const {
    std::vector<double> mean(dim, 0);
    for (const uint32_t m : members) {
      const float* x = row(m);
      for (uint32_t j = 0; j < dim; ++j) mean[j] += x[j];
    }
    for (double& value : mean) value /= static_cast<double>(members.size());
    return mean;
  }
};

// The points in units of how far clusters spread in each dimension, the mean over dimensions kept:
// a query may look along any of them, and one that varies much anyway must not drown the others.
std::vector<float> ScaleBySpread(const Points& points,
                                 const std::vector<ClusterMembers>& clusters) {
  std::vector<double> variance(points.dim, 0);
  for (const ClusterMembers& members : clusters) {
    const std::vector<double> mean = points.Mean(members);
    for (const uint32_t m : members) {
      const float* x = points.row(m);
      for (uint32_t j = 0; j < points.dim; ++j) variance[j] += (x[j] - mean[j]) * (x[j] - mean[j]);
    }
  }
  double average = 0;
  for (const double v : variance) average += v / points.dim;
  std::vector<float> scaled(points.values.begin(), points.values.end());
  if (average == 0) return scaled;
  for (double& v : variance) v = 1 / std::sqrt(std::max(v / average, kSpreadMin));
  for (size_t first = 0; first < scaled.size(); first += points.dim) {
    float* row = &scaled[first];
    for (uint32_t j = 0; j < points.dim; ++j) row[j] = static_cast<float>(row[j] * variance[j]);
  }
  return scaled;
}

struct Spread {
  double squares = 0;         // Sum of squared distances from the mean.
  double farthest = 0;        // The largest one.
  uint32_t farthest_idx = 0;  // In the cluster.
};

Spread SpreadOf(const Points& points, const ClusterMembers& members) {
  Spread spread;
  const std::vector<double> mean = points.Mean(members);
  for (uint32_t i = 0; i < members.size(); ++i) {
    const double squared = points.SquaredDistance(members[i], mean);
    spread.squares += squared;
    if (squared > spread.farthest) {
      spread.farthest = squared;
      spread.farthest_idx = i;
    }
  }
  return spread;
}

// By how much the farthest key's squared distance from the mean of the n - 1 others exceeds what
// their own spread leads to expect: scaled by (n - 1) / n, it would be their variance on average.
// Two keys have no spread without one of them; the segment's stands in.
double ExcessOf(const Spread& spread, size_t size, double segment_variance) {
  if (size < 2) return 0;
  const double n = static_cast<double>(size);
  const double from_others = spread.farthest * n / (n - 1);
  const double variance = size == 2 ? segment_variance : (spread.squares - from_others) / (n - 2);
  return from_others - variance;
}

// Two means of the members, started from one of them and the mean of the rest. The part of that
// member comes first; neither is empty.
std::pair<ClusterMembers, ClusterMembers> CutAround(const Points& points,
                                                    const ClusterMembers& members,
                                                    uint32_t seed_idx) {
  ClusterMembers near = {members[seed_idx]}, rest = members;
  rest.erase(rest.begin() + seed_idx);
  for (int round = 0; round < kTwoMeansRounds; ++round) {
    const std::vector<double> near_mean = points.Mean(near), rest_mean = points.Mean(rest);
    ClusterMembers next_near, next_rest;
    for (const uint32_t m : members) {
      const bool nearer =
          points.SquaredDistance(m, near_mean) < points.SquaredDistance(m, rest_mean);
      (nearer ? next_near : next_rest).push_back(m);
    }
    if (next_near.empty() || next_rest.empty() || next_near == near) break;
    near = std::move(next_near);
    rest = std::move(next_rest);
  }
  return {std::move(near), std::move(rest)};
}

struct Candidate {
  double excess = 0;
  uint32_t cluster = 0;
  uint32_t seed_idx = 0;

  // Largest excess on top of the queue; the lower cluster among equals.
  friend bool operator<(const Candidate& a, const Candidate& b) {
    return a.excess != b.excess ? a.excess < b.excess : a.cluster > b.cluster;
  }
};

}  // namespace

void SeparateFarKeys(std::span<const float> points_in, uint32_t dim, double excess,
                     uint32_t added_max, std::vector<ClusterMembers>* clusters) {
  const std::vector<float> scaled = ScaleBySpread({points_in, dim}, *clusters);
  const Points points{scaled, dim};
  std::vector<Spread> spreads;
  double squares = 0, freedom = 0;
  for (const ClusterMembers& members : *clusters) {
    spreads.push_back(SpreadOf(points, members));
    squares += spreads.back().squares;
    freedom += static_cast<double>(members.size() - 1);
  }
  if (freedom == 0) return;
  const double variance = squares / freedom;
  const double threshold = excess * variance;

  std::priority_queue<Candidate> queue;
  const auto consider = [&](uint32_t cluster, const Spread& spread) {
    const double found = ExcessOf(spread, (*clusters)[cluster].size(), variance);
    if (found > threshold) queue.push({found, cluster, spread.farthest_idx});
  };
  for (uint32_t c = 0; c < spreads.size(); ++c) consider(c, spreads[c]);
  for (uint32_t added = 0; added < added_max && !queue.empty(); ++added) {
    const Candidate worst = queue.top();
    queue.pop();
    auto [near, rest] = CutAround(points, (*clusters)[worst.cluster], worst.seed_idx);
    (*clusters)[worst.cluster] = std::move(rest);
    clusters->push_back(std::move(near));
    for (const uint32_t c : {worst.cluster, static_cast<uint32_t>(clusters->size() - 1)}) {
      consider(c, SpreadOf(points, (*clusters)[c]));
    }
  }
}

}  // namespace wavekv
