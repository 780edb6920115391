#include "bench/quality_questions.h"

#include <utility>

namespace wavekv::bench {
namespace {

constexpr double kRatios[] = {0.005, 0.009, 0.018, 0.036, 0.072, 0.144, 0.288};
constexpr double kPaperRatio = 0.018;
// Of all clusters the paper estimates 23.2 %; a budget counts those that are not retrieved.
constexpr double kPaperEstimateRatio = 0.232 / (1 - kPaperRatio);
constexpr uint32_t kAllClusters = UINT32_MAX;

ZoneBudget Budget(BudgetKind kind, double value, uint32_t sketch_clusters) {
  ZoneBudget budget;
  budget.kind = kind;
  budget.value = value;
  budget.sketch_clusters = sketch_clusters;
  return budget;
}

// A curve over what is retrieved, without a sketch.
void AddRatios(const char* question, const std::string& series, const Policy& policy,
               QuestionSet* set) {
  for (const double ratio : kRatios) {
    Question row = {question, series, ratio, policy};
    row.policy.budget.kind = BudgetKind::kRatio;
    row.policy.budget.value = ratio;
    row.policy.budget.sketch_clusters = 0;
    set->questions.push_back(std::move(row));
  }
}

void AddSketchCounts(const char* question, const std::string& series, double ratio,
                     QuestionSet* set) {
  for (const uint32_t count : {0u, 32u, 64u, 96u, 128u, 160u, 192u, 256u, kSketchClustersMax}) {
    set->questions.push_back({question,
                              series,
                              static_cast<double>(count),
                              {.budget = Budget(BudgetKind::kRatio, ratio, count)}});
  }
}

void AddRanking(QuestionSet* set) {
  const std::pair<const char*, RankBy> ranks[] = {{"expected error", RankBy::kExpectedError},
                                                  {"gain of the estimate", RankBy::kEstimateGain},
                                                  {"mass, sum", RankBy::kMassSum},
                                                  {"mass, largest", RankBy::kMassMax},
                                                  {"without size, sum", RankBy::kPlainSum},
                                                  {"without size, largest", RankBy::kPlainMax}};
  for (const auto& [name, rank] : ranks) {
    AddRatios("ranking", name, {.rank = rank}, set);
    for (const uint32_t count : {64u, 128u, 256u}) {
      set->questions.push_back(
          {"ranking, sketch",
           name,
           static_cast<double>(count),
           {.rank = rank, .budget = Budget(BudgetKind::kRatio, kDefaultRetrievalRatio, count)}});
    }
  }
}

void AddEstimation(QuestionSet* set) {
  AddRatios("estimation", "all clusters", {}, set);
  AddRatios("estimation", "all, without gain", {.plain_estimate = true}, set);
  Policy part;
  part.budget.estimate_ratio = kPaperEstimateRatio;
  AddRatios("estimation", "23.2 %", part, set);
  part.budget.estimate_ratio = 0;
  AddRatios("estimation", "none", part, set);
  Policy paper = {.rank = RankBy::kPlainSum, .plain_estimate = true};
  paper.budget.estimate_ratio = kPaperEstimateRatio;
  AddRatios("estimation", "the paper's zones", paper, set);
}

void AddBudgets(QuestionSet* set) {
  AddRatios("budgets", "ratio", {}, set);
  const auto add = [set](const char* question, const char* series, const ZoneBudget& budget) {
    set->questions.push_back({question, series, budget.value, {.budget = budget}});
  };
  for (const double count : {8, 16, 32, 64, 128}) {
    add("budgets", "clusters", Budget(BudgetKind::kClusters, count, 0));
  }
  for (const double coverage : {0.5, 0.7, 0.8, 0.9, 0.95, 0.98}) {
    ZoneBudget budget = Budget(BudgetKind::kCoverage, coverage, 0);
    budget.clusters_max = kAllClusters;
    add("budgets", "coverage", budget);
    budget = Budget(BudgetKind::kCoverage, coverage, kDefaultSketchClusters);
    add("budgets, sketch", "coverage", budget);
  }
  for (const double ratio : kRatios) {
    add("budgets, sketch", "ratio", Budget(BudgetKind::kRatio, ratio, kDefaultSketchClusters));
  }
  for (const double error : {0.5, 0.2, 0.1, 0.05, 0.02, 0.01}) {
    ZoneBudget budget = Budget(BudgetKind::kError, error, 0);
    add("budgets", "error, cap 1/8", budget);
    budget.clusters_max = kAllClusters;
    add("budgets", "error, no cap", budget);
  }
}

}  // namespace

std::vector<QuestionSet> AllQuestions() {
  std::vector<QuestionSet> sets;
  QuestionSet base;
  AddRanking(&base);
  AddEstimation(&base);
  AddBudgets(&base);
  for (const double ratio : {0.0, 0.005, 0.018}) {
    AddSketchCounts("sketch", "retrieved " + std::to_string(ratio * 100).substr(0, 3) + " %", ratio,
                    &base);
  }
  AddRatios("outliers", "cut, 2 %", {}, &base);
  sets.push_back(std::move(base));
  for (const auto& [name, ratio] : {std::pair{"not cut", 0.0}, std::pair{"cut, 4 %", 0.04}}) {
    QuestionSet set;
    set.options.far_cluster_ratio_max = ratio;
    AddRatios("outliers", name, {}, &set);
    sets.push_back(std::move(set));
  }
  for (const uint64_t tokens : {1024, 2048, 4096, 8192}) {
    QuestionSet set;
    set.segment_tokens = tokens;
    AddRatios("segments", std::to_string(tokens) + " tokens", {}, &set);
    AddSketchCounts("segments, sketch", std::to_string(tokens) + " tokens", kDefaultRetrievalRatio,
                    &set);
    sets.push_back(std::move(set));
  }
  for (const uint32_t tokens : {8u, 16u, 32u}) {
    QuestionSet set;
    set.options.tokens_per_cluster = tokens;
    AddRatios("cluster size", std::to_string(tokens) + " tokens", {}, &set);
    AddSketchCounts("cluster size, sketch", std::to_string(tokens) + " tokens",
                    kDefaultRetrievalRatio, &set);
    sets.push_back(std::move(set));
  }
  return sets;
}

}  // namespace wavekv::bench
