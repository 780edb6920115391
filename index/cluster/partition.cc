#include "index/cluster/partition.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "index/cluster/far_keys.h"
#include "index/cluster/spherical_kmeans.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// The tokens of each label, below `count`; a label of no token is left out.
template <typename Label>
std::vector<ClusterMembers> MembersOf(std::span<const Label> labels, uint32_t count) {
  std::vector<ClusterMembers> clusters(count);
  for (uint32_t i = 0; i < labels.size(); ++i) clusters[labels[i]].push_back(i);
  std::erase_if(clusters, [](const ClusterMembers& members) { return members.empty(); });
  return clusters;
}

std::vector<ClusterMembers> RunKMeans(const simd::Kernels& kernels, std::span<const float> points,
                                      uint32_t token_count, uint32_t dim,
                                      const ClusterOptions& options) {
  const uint32_t count = ClusterCountFor(token_count, std::max(1u, options.tokens_per_cluster));
  const std::vector<float> initial = EvenlySpaced(points, token_count, dim, count);
  const std::vector<uint32_t> labels =
      SphericalKMeans(kernels,
                      {points, initial, token_count, count, dim, options.iterations, options.pause})
          .labels;
  return MembersOf(std::span<const uint32_t>(labels), count);
}

std::vector<ClusterMembers> TakeLabels(std::span<const uint16_t> labels) {
  return MembersOf(labels, uint32_t{*std::max_element(labels.begin(), labels.end())} + 1);
}

}  // namespace

std::vector<float> CentreKeys(std::span<const float> keys, uint32_t token_count, uint32_t dim) {
  std::vector<double> mean(dim, 0), largest(dim, 0);
  for (uint32_t i = 0; i < token_count; ++i) {
    const float* key = &keys[size_t{i} * dim];
    for (uint32_t j = 0; j < dim; ++j) mean[j] += key[j];
  }
  for (double& x : mean) x /= token_count;
  for (uint32_t i = 0; i < token_count; ++i) {
    const float* key = &keys[size_t{i} * dim];
    for (uint32_t j = 0; j < dim; ++j) {
      const double distance = std::abs(key[j] - mean[j]);
      largest[j] = largest[j] > distance ? largest[j] : distance;
    }
  }
  const double most = *std::max_element(largest.begin(), largest.end());
  const double scale = most > 0 ? std::ldexp(1.0, -std::ilogb(most)) : 1.0;
  std::vector<float> centred(keys.size());
  for (uint32_t i = 0; i < token_count; ++i) {
    const float* key = &keys[size_t{i} * dim];
    float* out = &centred[size_t{i} * dim];
    for (uint32_t j = 0; j < dim; ++j) out[j] = static_cast<float>((key[j] - mean[j]) * scale);
  }
  return centred;
}

std::vector<float> EvenlySpaced(std::span<const float> points, uint32_t token_count, uint32_t dim,
                                uint32_t count) {
  std::vector<float> chosen(size_t{count} * dim);
  for (uint32_t c = 0; c < count; ++c) {
    const size_t token = (uint64_t{c} * token_count + token_count / 2) / count;
    std::copy_n(&points[token * dim], dim, &chosen[size_t{c} * dim]);
  }
  return chosen;
}

std::vector<ClusterMembers> PartitionKeys(const simd::Kernels& kernels, std::span<const float> keys,
                                          uint32_t token_count, uint32_t dim,
                                          const ClusterOptions& options,
                                          std::span<const uint16_t> labels) {
  WAVEKV_CHECK(token_count > 0 && keys.size() == size_t{token_count} * dim, "keys shape");
  WAVEKV_CHECK(labels.empty() || labels.size() == token_count, "a label for each token, or none");
  const std::vector<float> points = CentreKeys(keys, token_count, dim);
  std::vector<ClusterMembers> found =
      labels.empty() ? RunKMeans(kernels, points, token_count, dim, options) : TakeLabels(labels);
  std::vector<ClusterMembers> clusters;
  for (ClusterMembers& members : found) {
    for (ClusterMembers& part : SplitCluster(points, dim, std::move(members), kClusterTokensMax)) {
      clusters.push_back(std::move(part));
    }
  }
  if (options.pause) options.pause();
  const double added_max = options.far_cluster_ratio_max * token_count;
  SeparateFarKeys(points, dim, options.far_key_excess, static_cast<uint32_t>(added_max), &clusters);
  std::sort(clusters.begin(), clusters.end(),
            [](const ClusterMembers& a, const ClusterMembers& b) { return a[0] < b[0]; });
  return clusters;
}

}  // namespace wavekv
