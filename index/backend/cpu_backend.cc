#include "index/backend/cpu_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "index/backend/cpu_estimate.h"
#include "index/backend/cpu_sketch.h"
#include "index/backend/softmax_accumulator.h"
#include "index/cluster/cluster_segment.h"
#include "index/zone/cluster_mass.h"
#include "index/zone/select_zones.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// Times a clamped key spread this is infinite at worst, and then saturates: never NaN.
constexpr double kReachSquaredMax = 1e30;

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
    const uint32_t clusters = ClusterCount(index);
    scores->cluster_count = clusters;
    scores->group_size = query.group_size;
    scores->logits.resize(size_t{query.group_size} * clusters);
    scores->mass_share.assign(clusters, 0);
    scores->rank.assign(clusters, 0);
    std::vector<float> log_sizes(clusters);
    uint32_t first = 0;
    for (const SegmentHead* segment : index) {
      kernels_.dot_rows(segment->index_dtype, query.queries.data(), query.group_size, query.key_dim,
                        segment->centroids.data(), segment->cluster_count, query.scale,
                        scores->logits.data() + first, clusters);
      for (uint32_t c = 0; c < segment->cluster_count; ++c) {
        log_sizes[first + c] = LogSize(segment->sizes[c]);
      }
      first += segment->cluster_count;
    }
    scores->total_lse.assign(steady_lse.begin(), steady_lse.end());
    std::vector<float> share(clusters);
    for (uint32_t g = 0; g < query.group_size; ++g) {
      kernels_.add(scores->logits.data() + size_t{g} * clusters, log_sizes.data(), clusters,
                   share.data());
      const float largest = kernels_.max(share.data(), clusters);
      const float sum = kernels_.exp_sum(share.data(), clusters, largest);
      if (!(sum > 0)) continue;
      kernels_.multiply_add(1 / sum, share.data(), clusters, scores->mass_share.data());
      // Of the head's whole mass the clusters hold 1 / (1 + steady / clusters).
      const float clusters_lse = largest + std::log(sum);
      const float whole = 1 + std::exp(steady_lse[g] - clusters_lse);
      const float weight = 1 / (sum * whole);
      scores->total_lse[g] = std::isinf(whole) ? steady_lse[g] : clusters_lse + std::log(whole);
      AddRanks(index, query, g, weight, share.data(), scores->rank.data());
    }
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
    constexpr uint32_t kTileRows = SoftmaxAccumulator::kTileRows;
    SoftmaxAccumulator accumulator(kernels_, query.group_size, query.value_dim,
                                   query.payload_dtype);
    std::vector<float> scores(size_t{query.group_size} * kTileRows);
    std::vector<ValueRun> tile;
    uint32_t tile_rows = 0;
    const size_t key_bytes = query.key_dim * DTypeBytes(query.payload_dtype);
    const size_t value_bytes = query.value_dim * DTypeBytes(query.payload_dtype);
    for (const RowRun& run : rows) {
      for (uint32_t row = 0; row < run.row_count;) {
        const uint32_t count = std::min(run.row_count - row, kTileRows - tile_rows);
        kernels_.dot_rows(query.payload_dtype, query.queries.data(), query.group_size,
                          query.key_dim, run.keys + row * key_bytes, count, query.scale,
                          scores.data() + tile_rows, kTileRows);
        tile.push_back({run.values + row * value_bytes, count});
        tile_rows += count;
        row += count;
        if (tile_rows == kTileRows) {
          accumulator.AddTile(scores.data(), tile_rows, tile);
          tile.clear();
          tile_rows = 0;
        }
      }
    }
    accumulator.AddTile(scores.data(), tile_rows, tile);
    accumulator.Finish(result);
    return absl::OkStatus();
  }

  absl::Status AttendClusters(HeadIndex index, std::span<const uint32_t> clusters,
                              const GroupQuery& query, PartialAttention* result) override {
    CheckIndex(index, query);
    std::vector<RowRun> rows;
    rows.reserve(clusters.size());
    for (const uint32_t cluster : clusters) rows.push_back(ClusterRows(index, cluster));
    return AttendRows(rows, query, result);
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
    const std::vector<EstimatedCluster> located = LocateEstimated(index, clusters);
    EstimateOutput(kernels_, located, query, scores, &result->attention);
    result->lse_lower.clear();
    result->lse_upper.clear();
    if (bounds) {
      BoundEstimate(kernels_, located, QueryReaches(query), scores, &result->lse_lower,
                    &result->lse_upper);
    }
    return absl::OkStatus();
  }

 private:
  // Adds head `g`'s part of every cluster's rank; `share` [clusters] times `weight` is its share of
  // the head's mass.
  void AddRanks(HeadIndex index, const GroupQuery& query, uint32_t g, float weight,
                const float* share, float* rank) const {
    const float* q = query.queries.data() + size_t{g} * query.key_dim;
    for (const SegmentHead* segment : index) {
      double seen = 0;
      for (uint32_t j = 0; j < query.key_dim; ++j) {
        seen += double{q[j]} * q[j] * segment->spread_shares[j];
      }
      const double reach_squared = double{query.scale} * query.scale * seen;
      kernels_.add_misjudged(weight, static_cast<float>(std::min(reach_squared, kReachSquaredMax)),
                             share, segment->key_spreads.data(), segment->value_spreads.data(),
                             segment->cluster_count, rank);
      share += segment->cluster_count;
      rank += segment->cluster_count;
    }
  }

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
