#include "index/backend/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "index/backend/cpu_attend.h"
#include "index/backend/cpu_estimate.h"
#include "index/backend/cpu_rank.h"
#include "index/backend/cpu_sketch.h"
#include "index/cluster/cluster_segment.h"
#include "index/zone/cluster_mass.h"
#include "index/zone/select_zones.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

void CheckQuery(const GroupQuery& query) {
  WAVEKV_CHECK(query.group_size >= 1 && query.key_dim >= 1 && query.value_dim >= 1,
               "query without heads or dims");
  WAVEKV_CHECK(query.queries.size() == size_t{query.group_size} * query.key_dim,
               "queries [group_size, key_dim]");
}

void CheckIndex(HeadIndex index, const GroupQuery& query) {
  for (const SegmentHead* segment : index) {
    WAVEKV_CHECK(segment->key_dim == query.key_dim && segment->value_dim == query.value_dim,
                 "index and query of one head");
  }
}

void CheckScores(HeadIndex index, const GroupQuery& query, const ClusterScores& scores) {
  WAVEKV_CHECK(scores.cluster_count == ClusterCount(index) && scores.group_size == query.group_size,
               "scores of another index or query");
}

std::vector<double> QueryReaches(const GroupQuery& query) {
  std::vector<double> reaches;
  for (uint32_t g = 0; g < query.group_size; ++g) {
    reaches.push_back(
        QueryReach(query.queries.subspan(size_t{g} * query.key_dim, query.key_dim), query.scale));
  }
  return reaches;
}

class CpuBackend final : public ComputeBackend {
 public:
  explicit CpuBackend(const simd::Kernels& kernels) : kernels_(kernels) {}

  BackendCaps Caps() const override { return {"cpu", kernels_.isa}; }

  absl::StatusOr<SegmentHead> ClusterSegment(const ClusterInput& input,
                                             const ClusterOptions& options, std::byte* keys_out,
                                             std::byte* values_out) override {
    return ClusterSegmentOnCpu(kernels_, input, options, keys_out, values_out);
  }

  absl::Status RankClusters(HeadIndex index, const GroupQuery& query,
                            std::span<const float> steady_lse, ClusterScores* scores) override {
    CheckQuery(query);
    WAVEKV_CHECK(steady_lse.size() == query.group_size, "steady_lse [group_size]");
    CheckIndex(index, query);
    RankOnCpu(kernels_, index, query, steady_lse, scores);
    return absl::OkStatus();
  }

  absl::StatusOr<ZonePlan> SelectZones(HeadIndex index, const GroupQuery& query,
                                       const ClusterScores& scores,
                                       std::span<const float> steady_lse,
                                       const ZoneBudget& budget) override {
    WAVEKV_CHECK(steady_lse.size() == query.group_size, "steady_lse [group_size]");
    WAVEKV_CHECK(scores.cluster_count == ClusterCount(index), "scores of another index");
    return wavekv::SelectZones(index, scores, QueryReaches(query), steady_lse, budget);
  }

  absl::Status AttendRows(std::span<const RowRun> rows, const GroupQuery& query,
                          PartialAttention* result) override {
    CheckQuery(query);
    AttendOnCpu(kernels_, rows, query, result);
    return absl::OkStatus();
  }

  absl::Status AttendClusters(HeadIndex index, std::span<const uint32_t> clusters,
                              const GroupQuery& query, PartialAttention* result) override {
    CheckIndex(index, query);
    return AttendRows(RowsOfClusters(index, clusters), query, result);
  }

  absl::Status SketchClusters(HeadIndex index, std::span<const uint32_t> clusters,
                              const GroupQuery& query, const ClusterScores& scores, bool bounds,
                              EstimatedAttention* result) override {
    CheckQuery(query);
    CheckIndex(index, query);
    CheckScores(index, query, scores);
    SketchOutput(kernels_, LocateEstimated(index, clusters), query, QueryReaches(query), scores,
                 bounds, result);
    return absl::OkStatus();
  }

  absl::Status EstimateClusters(HeadIndex index, std::span<const uint32_t> clusters,
                                const GroupQuery& query, const ClusterScores& scores, bool bounds,
                                EstimatedAttention* result) override {
    CheckQuery(query);
    CheckIndex(index, query);
    CheckScores(index, query, scores);
    EstimateOnCpu(kernels_, index, clusters, query, scores, result);
    result->lse_lower.clear();
    result->lse_upper.clear();
    if (bounds) {
      BoundEstimate(kernels_, LocateEstimated(index, clusters), QueryReaches(query), scores,
                    &result->lse_lower, &result->lse_upper);
    }
    return absl::OkStatus();
  }

 private:
  const simd::Kernels& kernels_;
};

}  // namespace

std::unique_ptr<ComputeBackend> CreateCpuBackend(const simd::Kernels& kernels) {
  return std::make_unique<CpuBackend>(kernels);
}

std::unique_ptr<ComputeBackend> CreateCpuBackend() {
  return CreateCpuBackend(simd::ActiveKernels());
}

}  // namespace wavekv
