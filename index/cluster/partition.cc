#include "index/cluster/partition.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "index/cluster/far_keys.h"
#include "index/cluster/spherical_kmeans.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Subtracts the mean and scales by a power of two so that the largest element is about 1: squares
// then neither overflow nor vanish, whatever the size of the keys.
std::vector<float> CentreKeys(std::span<const float> keys, uint32_t token_count, uint32_t dim) {
  std::vector<double> mean(dim, 0);
  for (uint32_t i = 0; i < token_count; ++i) {
    for (uint32_t j = 0; j < dim; ++j) mean[j] += keys[size_t{i} * dim + j];
  }
  for (double& x : mean) x /= token_count;
  double largest = 0;
  for (uint32_t i = 0; i < token_count; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      largest = std::max(largest, std::abs(keys[size_t{i} * dim + j] - mean[j]));
    }
  }
  const double scale = largest > 0 ? std::ldexp(1.0, -std::ilogb(largest)) : 1.0;
  std::vector<float> centred(keys.size());
  for (uint32_t i = 0; i < token_count; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      const size_t at = size_t{i} * dim + j;
      centred[at] = static_cast<float>((keys[at] - mean[j]) * scale);
    }
  }
  return centred;
}

absl::StatusOr<std::vector<ClusterMembers>> RunKMeans(const simd::Kernels& kernels,
                                                      std::span<const float> points,
                                                      uint32_t token_count, uint32_t dim,
                                                      const ClusterOptions& options) {
  const uint32_t per_cluster = std::max(1u, options.tokens_per_cluster);
  const uint32_t count = (token_count + per_cluster - 1) / per_cluster;
  std::vector<float> initial(size_t{count} * dim);
  for (uint32_t c = 0; c < count; ++c) {
    const size_t token = (uint64_t{c} * token_count + token_count / 2) / count;
    std::copy_n(points.begin() + static_cast<ptrdiff_t>(token * dim), dim,
                initial.begin() + static_cast<ptrdiff_t>(size_t{c} * dim));
  }
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> labels,
                          SphericalKMeans(kernels, {points, initial, token_count, count, dim,
                                                    options.iterations, options.seed}));
  std::vector<ClusterMembers> clusters(count);
  for (uint32_t i = 0; i < token_count; ++i) clusters[labels[i]].push_back(i);
  std::erase_if(clusters, [](const ClusterMembers& members) { return members.empty(); });
  return clusters;
}

}  // namespace

absl::StatusOr<std::vector<ClusterMembers>> PartitionKeys(const simd::Kernels& kernels,
                                                          std::span<const float> keys,
                                                          uint32_t token_count, uint32_t dim,
                                                          const ClusterOptions& options) {
  WAVEKV_CHECK(token_count > 0 && keys.size() == size_t{token_count} * dim, "keys shape");
  const std::vector<float> points = CentreKeys(keys, token_count, dim);
  WAVEKV_ASSIGN_OR_RETURN(std::vector<ClusterMembers> found,
                          RunKMeans(kernels, points, token_count, dim, options));
  std::vector<ClusterMembers> clusters;
  for (ClusterMembers& members : found) {
    for (ClusterMembers& part : SplitCluster(points, dim, std::move(members), kClusterTokensMax)) {
      clusters.push_back(std::move(part));
    }
  }
  const double added_max = options.far_cluster_ratio_max * token_count;
  SeparateFarKeys(points, dim, options.far_key_excess, static_cast<uint32_t>(added_max), &clusters);
  std::sort(clusters.begin(), clusters.end(),
            [](const ClusterMembers& a, const ClusterMembers& b) { return a[0] < b[0]; });
  return clusters;
}

}  // namespace wavekv
