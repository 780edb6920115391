// The one file that sees FAISS: it catches what FAISS throws and keeps its OpenMP to one
// thread.
#include "index/cluster/spherical_kmeans.h"

#include <faiss/Clustering.h>
#include <faiss/Index.h>
#include <omp.h>

#include <exception>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// libgomp keeps the number per thread, so other threads' FAISS calls are not disturbed.
class OneOpenMpThread {
 public:
  OneOpenMpThread() : previous_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~OneOpenMpThread() { omp_set_num_threads(previous_); }
  OneOpenMpThread(const OneOpenMpThread&) = delete;
  OneOpenMpThread& operator=(const OneOpenMpThread&) = delete;

 private:
  const int previous_;
};

// Exact search for the one centroid with the largest dot product.
class DotAssigner final : public faiss::Index {
 public:
  DotAssigner(const simd::Kernels& kernels, int64_t dim)
      : faiss::Index(dim, faiss::METRIC_INNER_PRODUCT), kernels_(kernels) {}

  void add(int64_t n, const float* x) override {
    centroids_.insert(centroids_.end(), x, x + n * d);
    ntotal += n;
  }

  void reset() override {
    centroids_.clear();
    ntotal = 0;
  }

  void search(int64_t n, const float* x, int64_t k, float* distances, int64_t* labels,
              const faiss::SearchParameters* /*params*/ = nullptr) const override {
    WAVEKV_CHECK(k == 1, "k-means assigns each point to one centroid");
    scratch_.resize(simd::NearestScratchFloats(ntotal, d));
    kernels_.nearest_by_dot(x, n, centroids_.data(), ntotal, d, scratch_.data(), labels, distances);
  }

 private:
  const simd::Kernels& kernels_;
  std::vector<float> centroids_;
  mutable std::vector<float> scratch_;  // One training, one thread.
};

}  // namespace

absl::StatusOr<std::vector<uint32_t>> SphericalKMeans(const simd::Kernels& kernels,
                                                      const KMeansInput& input) {
  WAVEKV_CHECK(input.centroid_count >= 1 && input.centroid_count <= input.point_count,
               "more centroids than points");
  WAVEKV_CHECK(input.points.size() == size_t{input.point_count} * input.dim, "points shape");
  WAVEKV_CHECK(input.initial_centroids.size() == size_t{input.centroid_count} * input.dim,
               "initial centroids shape");
  const OneOpenMpThread one_thread;
  try {
    faiss::ClusteringParameters parameters;
    parameters.niter = static_cast<int>(input.iterations);
    parameters.spherical = true;
    parameters.seed = static_cast<int>(input.seed & 0x7fffffff);
    parameters.min_points_per_centroid = 1;
    // Never a subsample: every token counts.
    parameters.max_points_per_centroid = static_cast<int>(input.point_count);
    faiss::Clustering clustering(static_cast<int>(input.dim),
                                 static_cast<int>(input.centroid_count), parameters);
    clustering.centroids.assign(input.initial_centroids.begin(), input.initial_centroids.end());
    DotAssigner assigner(kernels, input.dim);
    if (input.iterations > 0 && input.centroid_count < input.point_count) {
      clustering.train(input.point_count, input.points.data(), assigner);
    } else {
      assigner.add(input.centroid_count, clustering.centroids.data());
    }
    std::vector<int64_t> nearest(input.point_count);
    std::vector<float> dots(input.point_count);
    assigner.search(input.point_count, input.points.data(), 1, dots.data(), nearest.data());
    return std::vector<uint32_t>(nearest.begin(), nearest.end());
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("k-means of ", input.point_count, " points of dim ",
                                            input.dim, ": FAISS: ", error.what()));
  }
}

}  // namespace wavekv
