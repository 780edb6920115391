// Fresh random inputs and naive float64 oracles for the tests of the index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "index/backend/compute_backend.h"
#include "storage/base/dtype.h"

namespace wavekv::test {

// A new seed for each run, or that of the environment variable WAVEKV_TEST_SEED; printed once.
uint64_t RunSeed();

// A generator of its own for each `stream` of the run.
std::mt19937_64 NewRandom(uint64_t stream);

// `count` numbers of N(0, deviation^2).
std::vector<float> Gaussian(std::mt19937_64& random, size_t count, double deviation = 1);

// Keys as topics make them: `topics` random centres, a new one every `run` tokens, plus
// noise * N(0, 1) in every dimension.
std::vector<float> TopicKeys(std::mt19937_64& random, uint32_t tokens, uint32_t dim,
                             uint32_t topics, uint32_t run, double noise);

// Rows in a storage type, and exactly what they hold as floats.
struct StoredRows {
  DType dtype = DType::kF32;
  uint32_t dim = 0;
  std::vector<std::byte> bytes;
  std::vector<float> floats;

  uint32_t count() const { return static_cast<uint32_t>(floats.size() / dim); }
};
StoredRows Store(DType dtype, uint32_t dim, std::span<const float> rows);

// Scores of one query against rows: scale * q . k in double.
std::vector<double> ExactScores(std::span<const float> query, std::span<const float> keys,
                                double scale);

// Exact attention of one query head in double.
struct ExactAttention {
  std::vector<double> out;
  double lse = 0;
};
ExactAttention Attend(std::span<const float> query, std::span<const float> keys,
                      std::span<const float> values, uint32_t value_dim, double scale);

// log(sum of exp(x)); -inf over nothing.
double LogSumExp(std::span<const double> x);

// Kernels::rank_clusters' tail of a variance.
double TailFactor(double v);

// |a - b| / |b|, or |a - b| when b is zero.
double RelativeError(std::span<const float> a, std::span<const double> b);

// A segment built by `backend` together with the memory of its payload.
struct BuiltSegment {
  std::vector<std::byte> keys;
  std::vector<std::byte> values;
  SegmentHead head;
};
// Fails the test when the backend refuses.
BuiltSegment Build(ComputeBackend& backend, const StoredRows& keys, const StoredRows& values,
                   uint64_t first_position = 0, const ClusterOptions& options = {},
                   std::span<const uint16_t> labels = {});

}  // namespace wavekv::test
