#include "bench/faiss_kmeans.h"

#include <faiss/Clustering.h>
#include <faiss/IndexFlat.h>
#include <omp.h>

// OpenBLAS's; another BLAS has no such knob.
extern "C" void openblas_set_num_threads(int threads) __attribute__((weak));

namespace wavekv::bench {

void SetFaissThreads(int omp_threads, int blas_threads) {
  omp_set_num_threads(omp_threads);
  if (openblas_set_num_threads != nullptr) openblas_set_num_threads(blas_threads);
}

std::vector<float> TrainFaiss(std::span<const float> points, uint32_t dim, uint32_t centroid_count,
                              uint32_t iterations, uint64_t seed) {
  const auto count = static_cast<faiss::Index::idx_t>(points.size() / dim);
  faiss::ClusteringParameters parameters;
  parameters.niter = static_cast<int>(iterations);
  parameters.spherical = true;
  parameters.seed = static_cast<int>(seed & 0x7fffffff);
  parameters.min_points_per_centroid = 1;
  parameters.max_points_per_centroid = static_cast<int>(count);
  faiss::Clustering clustering(static_cast<int>(dim), static_cast<int>(centroid_count), parameters);
  faiss::IndexFlatIP index(dim);
  clustering.train(count, points.data(), index);
  return std::move(clustering.centroids);
}

std::vector<uint32_t> FaissLabels(std::span<const float> points, uint32_t dim,
                                  std::span<const float> centroids) {
  const auto count = static_cast<faiss::Index::idx_t>(points.size() / dim);
  faiss::IndexFlatIP index(dim);
  index.add(static_cast<faiss::Index::idx_t>(centroids.size() / dim), centroids.data());
  std::vector<float> dots(points.size() / dim);
  std::vector<faiss::Index::idx_t> nearest(points.size() / dim);
  index.search(count, points.data(), 1, dots.data(), nearest.data());
  return {nearest.begin(), nearest.end()};
}

}  // namespace wavekv::bench
