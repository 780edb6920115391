#include "client/gpu/attention_choice.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// Launch, and the merge of the parts that a sequence is split into.
constexpr double kFullFixedUs = 9.4;
// Four kernels, most of it waiting for one another: begin, rank and select 24.5, attend 14.
constexpr double kWaveFixedUs = 38.5;
// Of the rate of full attention: what a kernel of tens of microseconds reaches.
constexpr double kRankShare = 0.69;
constexpr double kAttendShare = 0.91;

// The index: a cluster has a code of one byte a dimension with its scale and size, and a value sum.
constexpr double kTokensPerCluster = 15;
constexpr double kCodeBesideBytes = 8;
// The default budget of a step without sketches (UnsketchedRetrievalCount); a retrieved cluster is
// larger than the mean one.
constexpr double kRetrievedShare = 0.014;
constexpr double kRetrievedMin = 128;
constexpr double kTokensPerRetrieved = 18;

constexpr uint64_t kGranule = 1024;
constexpr uint64_t kTokensMax = uint64_t{1} << 32;

absl::Status Refuse(const char* field, double found, const char* allowed) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", found, "; allowed: ", allowed));
}

absl::Status Check(const AttentionProblem& problem, const DeviceRates& rates) {
  if (problem.batch == 0) return Refuse("batch", 0, "1 or more");
  if (problem.kv_head_count == 0) return Refuse("kv_head_count", 0, "1 or more");
  if (problem.head_dim == 0) return Refuse("head_dim", 0, "1 or more");
  if (problem.element_bytes == 0) return Refuse("element_bytes", 0, "1 or more");
  // Written so that NaN is refused, too.
  if (!(problem.hit_ratio >= 0 && problem.hit_ratio <= 1)) {
    return Refuse("hit_ratio", problem.hit_ratio, "0 to 1");
  }
  if (!(rates.hbm_bytes_per_s > 0 && std::isfinite(rates.hbm_bytes_per_s))) {
    return Refuse("hbm_bytes_per_s", rates.hbm_bytes_per_s, "more than 0");
  }
  if (!(rates.bus_bytes_per_s > 0 && std::isfinite(rates.bus_bytes_per_s))) {
    return Refuse("bus_bytes_per_s", rates.bus_bytes_per_s, "more than 0");
  }
  return absl::OkStatus();
}

AttentionCost Estimate(const AttentionProblem& problem, const DeviceRates& rates) {
  const double heads = static_cast<double>(problem.batch) * problem.kv_head_count;
  const auto tokens = static_cast<double>(problem.tokens);
  const double dim = problem.head_dim;
  const double vector_bytes = dim * problem.element_bytes;
  const double full_bytes = heads * tokens * 2 * vector_bytes;

  const double clusters = tokens / kTokensPerCluster;
  const double retrieved = std::min(clusters, std::max(kRetrievedMin, kRetrievedShare * clusters));
  const double rows = std::min(retrieved * kTokensPerRetrieved, tokens);
  const double ranked_bytes = heads * clusters * (dim + kCodeBesideBytes);
  const double row_bytes = heads * rows * 2 * vector_bytes;
  const double attended_bytes = heads * clusters * vector_bytes + row_bytes;
  const double missed_bytes = row_bytes * (1 - problem.hit_ratio);

  const double rank_s = ranked_bytes / (kRankShare * rates.hbm_bytes_per_s);
  const double attend_s = std::max(attended_bytes / (kAttendShare * rates.hbm_bytes_per_s),
                                   missed_bytes / rates.bus_bytes_per_s);
  return {.full_us = kFullFixedUs + full_bytes / rates.hbm_bytes_per_s * 1e6,
          .wave_us = kWaveFixedUs + (rank_s + attend_s) * 1e6};
}

}  // namespace

absl::StatusOr<AttentionCost> EstimateAttention(const AttentionProblem& problem,
                                                const DeviceRates& rates) {
  WAVEKV_RETURN_IF_ERROR(Check(problem, rates));
  return Estimate(problem, rates);
}

absl::StatusOr<uint64_t> FullAttentionTokensMax(AttentionProblem problem, uint64_t tokens_max,
                                                const DeviceRates& rates) {
  WAVEKV_RETURN_IF_ERROR(Check(problem, rates));
  if (tokens_max > kTokensMax) {
    return Refuse("tokens_max", static_cast<double>(tokens_max), "up to 2^32");
  }
  // Step by step: where misses dominate, a longer context may be full attention's again.
  uint64_t most = 0;
  while (most < tokens_max) {
    problem.tokens = std::min(most + kGranule, tokens_max);
    if (!Estimate(problem, rates).full_wins()) break;
    most = problem.tokens;
  }
  return most;
}

}  // namespace wavekv::client
