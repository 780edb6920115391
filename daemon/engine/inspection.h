// What operators and researchers look at: the index, one query's choice, and its error.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/engine/layer_snapshot.h"
#include "daemon/engine/types.h"
#include "index/backend/compute_backend.h"
#include "storage/base/thread_pool.h"

namespace wavekv {

inline constexpr size_t kSegmentsListedMax = 1024;
inline constexpr uint32_t kClustersExplainedDefault = 20;
inline constexpr uint32_t kClustersExplainedMax = 1000;
inline constexpr size_t kPositionsListedMax = 32;

// Segments, histograms and sizes over (layer, snapshot) pairs of one sequence, one KV head or all.
IndexDescription DescribeLayers(std::span<const std::pair<uint32_t, LayerSnapshot>> layers,
                                std::optional<uint32_t> kv_head);

// Why a step of these queries [group_size, key_dim] chooses its clusters: the `top` best with their
// estimated and true masses, and the true mass of each zone. 0: kClustersExplainedDefault.
absl::StatusOr<Explanation> ExplainHead(ComputeBackend* backend, const LayerSnapshot& snapshot,
                                        uint32_t kv_head, std::span<const float> queries,
                                        const ZoneBudget& budget, uint32_t top);

// Runs exact attention beside the approximation, for queries [query_heads, key_dim].
absl::StatusOr<LayerRecall> RecallOfLayer(ComputeBackend* backend, ThreadPool* pool, uint32_t layer,
                                          const LayerSnapshot& snapshot,
                                          const QueryVectors& queries, const ZoneBudget& budget);

// "0.5 % of the clusters", with the cap and the estimated share where they matter.
std::string BudgetText(const ZoneBudget& budget);

}  // namespace wavekv
