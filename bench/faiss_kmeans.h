// faiss::Clustering: the baseline of index building, and the oracle of its tests.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace wavekv::bench {

// Sets the threads of FAISS's own loops, in the calling thread, and of the BLAS it calls, in the
// process.
void SetFaissThreads(int omp_threads, int blas_threads);

// Trains `centroid_count` centroids [centroid_count, dim] on `points` [.., dim]: spherical,
// `iterations` iterations, from random points, as FAISS does by default; no subsample.
std::vector<float> TrainFaiss(std::span<const float> points, uint32_t dim, uint32_t centroid_count,
                              uint32_t iterations, uint64_t seed);

// For each point the centroid with the largest dot product.
std::vector<uint32_t> FaissLabels(std::span<const float> points, uint32_t dim,
                                  std::span<const float> centroids);

}  // namespace wavekv::bench
