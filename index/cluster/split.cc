#include "index/cluster/split.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace wavekv {
namespace {

constexpr int kPowerIterations = 4;

double Dot(const float* point, const std::vector<double>& mean,
           const std::vector<double>& direction) {
  double sum = 0;
  for (size_t j = 0; j < mean.size(); ++j) sum += (point[j] - mean[j]) * direction[j];
  return sum;
}

// Scales to length 1; false when there is no length.
bool Normalise(std::vector<double>* v) {
  double sum = 0;
  for (const double x : *v) sum += x * x;
  const double norm = std::sqrt(sum);
  if (!(norm > 0) || !std::isfinite(norm)) return false;
  for (double& x : *v) x /= norm;
  return true;
}

std::vector<double> MeanOf(std::span<const float> points, uint32_t dim,
                           const ClusterMembers& members) {
  std::vector<double> mean(dim, 0);
  for (const uint32_t m : members) {
    for (uint32_t j = 0; j < dim; ++j) mean[j] += points[size_t{m} * dim + j];
  }
  for (double& x : mean) x /= static_cast<double>(members.size());
  return mean;
}

// Projections of the members on their principal direction (power iteration, started from the
// member farthest from the mean); all zero when the members are equal.
std::vector<double> Project(std::span<const float> points, uint32_t dim,
                            const ClusterMembers& members) {
  const std::vector<double> mean = MeanOf(points, dim, members);
  std::vector<double> direction(dim, 0);
  double farthest = 0;
  for (const uint32_t m : members) {
    const float* point = &points[size_t{m} * dim];
    double distance = 0;
    for (uint32_t j = 0; j < dim; ++j) distance += (point[j] - mean[j]) * (point[j] - mean[j]);
    if (distance > farthest) {
      farthest = distance;
      for (uint32_t j = 0; j < dim; ++j) direction[j] = point[j] - mean[j];
    }
  }
  std::vector<double> projections(members.size(), 0);
  if (!Normalise(&direction)) return projections;
  for (int iteration = 0; iteration < kPowerIterations; ++iteration) {
    std::vector<double> next(dim, 0);
    for (const uint32_t m : members) {
      const float* point = &points[size_t{m} * dim];
      const double weight = Dot(point, mean, direction);
      for (uint32_t j = 0; j < dim; ++j) next[j] += weight * (point[j] - mean[j]);
    }
    if (!Normalise(&next)) break;
    direction = std::move(next);
  }
  for (size_t i = 0; i < members.size(); ++i) {
    projections[i] = Dot(&points[size_t{members[i]} * dim], mean, direction);
  }
  return projections;
}

// Where to cut ascending projections: the middle when nothing tells them apart.
size_t CutOf(const std::vector<double>& sorted) {
  const size_t count = sorted.size();
  const size_t first = std::max<size_t>(1, count / 4);
  const size_t last = std::max(first, count - count / 4);
  double total = 0;
  for (const double x : sorted) total += x;
  double left = 0;
  for (size_t i = 0; i < first; ++i) left += sorted[i];
  size_t best = count / 2;
  double best_gain = 0;
  // The squares left inside shrink by left^2 / n_left + right^2 / n_right.
  for (size_t cut = first; cut <= last && cut < count; ++cut) {
    const double right = total - left;
    const double gain =
        left * left / static_cast<double>(cut) + right * right / static_cast<double>(count - cut);
    if (gain > best_gain) {
      best_gain = gain;
      best = cut;
    }
    left += sorted[cut];
  }
  return best;
}

}  // namespace

std::vector<ClusterMembers> SplitCluster(std::span<const float> points, uint32_t dim,
                                         ClusterMembers members, uint32_t size_max) {
  std::vector<ClusterMembers> done;
  std::vector<ClusterMembers> pending;
  pending.push_back(std::move(members));
  while (!pending.empty()) {
    ClusterMembers part = std::move(pending.back());
    pending.pop_back();
    if (part.size() <= size_max) {
      done.push_back(std::move(part));
      continue;
    }
    const std::vector<double> projections = Project(points, dim, part);
    std::vector<uint32_t> order(part.size());
    for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return projections[a] != projections[b] ? projections[a] < projections[b] : a < b;
    });
    std::vector<double> sorted(part.size());
    for (size_t i = 0; i < order.size(); ++i) sorted[i] = projections[order[i]];
    const size_t cut = CutOf(sorted);
    ClusterMembers left, right;
    for (size_t i = 0; i < order.size(); ++i) {
      (i < cut ? left : right).push_back(part[order[i]]);
    }
    std::sort(left.begin(), left.end());
    std::sort(right.begin(), right.end());
    pending.push_back(std::move(right));
    pending.push_back(std::move(left));
  }
  return done;
}

}  // namespace wavekv
