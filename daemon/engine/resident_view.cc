#include "daemon/engine/resident_view.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "index/zone/select_zones.h"
#include "storage/base/check.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Of the head that has the most: a step on the device has no sketches.
uint32_t RetrieveCount(const LayerVersion& version, uint32_t kv_head_count,
                       const ZoneBudget& budget, bool sketch) {
  uint32_t most = 0;
  for (uint32_t head = 0; head < kv_head_count; ++head) {
    uint32_t clusters = 0;
    for (const SegmentHead* segment : version.Head(head)) clusters += segment->cluster_count;
    most = std::max(most, UnsketchedRetrievalCount(budget, sketch, clusters));
  }
  return most;
}

absl::StatusOr<ResidentSegment> PlaceSegment(const std::shared_ptr<const Segment>& segment,
                                             uint32_t kv_head, const ResidentWindows& windows) {
  const SegmentHead& head = segment->head(kv_head);
  for (uint32_t window = 0; window < windows.size(); ++window) {
    const std::optional<uint64_t> keys = windows[window]->FileOffset(head.keys);
    if (!keys.has_value()) continue;
    const std::optional<uint64_t> values = windows[window]->FileOffset(head.values);
    WAVEKV_CHECK(values.has_value(), "keys and values of a segment lie in one arena");
    return ResidentSegment{&head, segment, window, *keys, *values};
  }
  return absl::FailedPreconditionError(
      absl::StrCat("tokens ", segment->range().begin, " to ", segment->range().end - 1,
                   " lie in memory that the attachment has no window of; attach again"));
}

absl::Status CheckBudget(const ZoneBudget& budget) {
  const auto refuse = [](const char* what) {
    return absl::FailedPreconditionError(
        absl::StrCat("a step on the device has no ", what,
                     "; create the sequence with a budget of ratio or clusters, or use Attend"));
  };
  if (budget.kind == BudgetKind::kCoverage) return refuse("coverage budget");
  if (budget.kind == BudgetKind::kError) return refuse("error budget");
  if (budget.estimate_ratio < 1) return refuse("estimate_ratio below 1");
  return absl::OkStatus();
}

}  // namespace

ResidentWindows FindWindows(const BlockPool& pool, std::shared_ptr<const Arena> own,
                            std::span<const LayerSnapshot> layers) {
  ResidentWindows windows = {std::move(own)};
  for (const LayerSnapshot& layer : layers) {
    for (const auto& segment : layer.version->segments()) {
      const std::byte* const keys = segment->head(0).keys;
      const bool known = std::any_of(windows.begin(), windows.end(), [keys](const auto& window) {
        return window->FileOffset(keys).has_value();
      });
      if (known) continue;
      windows.push_back(pool.ArenaOf(keys));
      WAVEKV_CHECK(windows.back() != nullptr, "a segment's rows lie in an arena of the pool");
    }
  }
  return windows;
}

absl::StatusOr<ResidentLayer> ShowLayer(const LayerSnapshot& snapshot,
                                        const ResidentWindows& windows, const ZoneBudget& budget,
                                        bool sketch) {
  const uint32_t kv_heads = snapshot.shape->kv_head_count;
  ResidentLayer view;
  view.version = snapshot.version->number();
  view.token_count = snapshot.token_count;
  view.steady_first = snapshot.version->clustered_end();
  view.sink_count = static_cast<uint32_t>(snapshot.sink_count());
  view.retrieve_count = RetrieveCount(*snapshot.version, kv_heads, budget, sketch);
  view.heads.resize(kv_heads);
  for (uint32_t head = 0; head < kv_heads; ++head) {
    for (const auto& segment : snapshot.version->segments()) {
      WAVEKV_ASSIGN_OR_RETURN(ResidentSegment placed, PlaceSegment(segment, head, windows));
      view.heads[head].push_back(std::move(placed));
    }
    const RowRuns runs = snapshot.SteadyRuns(head);
    view.steady.emplace_back(runs.begin(), runs.end());
  }
  view.steady_owners = snapshot.SteadyOwners();
  return view;
}

absl::Status CheckStepsOnDevice(const SequenceSpec& spec) {
  if (!spec.index.dense_layers.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("layer ", spec.index.dense_layers.front(),
                     " is dense, and a step on the device has no dense layers; use Attend"));
  }
  WAVEKV_RETURN_IF_ERROR(CheckBudget(spec.index.budget));
  for (const auto& [layer, budget] : spec.index.layer_budgets) {
    WAVEKV_RETURN_IF_ERROR(CheckBudget(budget));
  }
  return absl::OkStatus();
}

}  // namespace wavekv
