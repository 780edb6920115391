#include "index/zone/zone_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

absl::Status CheckBetween(const char* field, double found, double low, double high) {
  if (found >= low && found <= high) return absl::OkStatus();  // NaN is in no range.
  return absl::InvalidArgumentError(
      absl::StrCat("budget: ", field, " is ", found, ", expected ", low, " to ", high));
}

}  // namespace

absl::Status ValidateBudget(const ZoneBudget& budget) {
  absl::Status value;
  switch (budget.kind) {
    case BudgetKind::kRatio:
      value = CheckBetween("ratio", budget.value, 0, 1);
      break;
    case BudgetKind::kClusters:
      value = CheckBetween("clusters", budget.value, 0, std::numeric_limits<uint32_t>::max());
      if (value.ok() && budget.value != std::floor(budget.value)) {
        value = absl::InvalidArgumentError(
            absl::StrCat("budget: clusters is ", budget.value, ", expected a whole number"));
      }
      break;
    case BudgetKind::kCoverage:
      value = CheckBetween("coverage", budget.value, 0, 1);
      break;
    case BudgetKind::kError:
      value = CheckBetween("error", budget.value, 0, 1);
      if (value.ok() && budget.estimate_ratio != 1.0) {
        value = absl::InvalidArgumentError(
            absl::StrCat("budget: estimate_ratio is ", budget.estimate_ratio,
                         ", expected 1 with an error budget: no bound covers ignored clusters"));
      }
      break;
    default:
      value =
          absl::InvalidArgumentError(absl::StrCat("budget: kind is ", static_cast<int>(budget.kind),
                                                  ", expected ratio, clusters, coverage or error"));
  }
  if (!value.ok()) return value;
  WAVEKV_RETURN_IF_ERROR(
      CheckBetween("sketch_clusters", budget.sketch_clusters, 0, kSketchClustersMax));
  return CheckBetween("estimate_ratio", budget.estimate_ratio, 0, 1);
}

void MoveTailToEstimation(uint32_t keep, ZonePlan* plan) {
  if (keep >= plan->retrieved.size()) return;
  const auto tail = plan->retrieved.begin() + keep;
  plan->moved_to_estimation += static_cast<uint32_t>(plan->retrieved.end() - tail);
  std::sort(tail, plan->retrieved.end());
  std::vector<uint32_t>& target = plan->can_sketch ? plan->sketched : plan->estimated;
  const auto middle = static_cast<ptrdiff_t>(target.size());
  target.insert(target.end(), tail, plan->retrieved.end());
  std::inplace_merge(target.begin(), target.begin() + middle, target.end());
  plan->retrieved.resize(keep);
  if (plan->error_budget_met) {
    plan->error_budget_met = false;
    plan->error_budget_capped = true;
  }
}

}  // namespace wavekv
