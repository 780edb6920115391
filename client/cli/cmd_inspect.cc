// index, explain and recall: what a sequence's wave index looks like and how well it answers.

#include <cstdio>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/commands.h"
#include "client/cli/histogram.h"
#include "client/cli/json.h"
#include "client/cli/text.h"
#include "client/validation.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

constexpr size_t kHistogramColumns = 40;
constexpr size_t kSegmentRowsMax = 24;
constexpr size_t kPositionsShown = 6;

using Align = Table::Align;

void PrintHistogram(const char* title, const Histogram& histogram, bool whole) {
  absl::PrintF("\n%s\n", title);
  for (const std::string& line : RenderHistogram(histogram, whole, kHistogramColumns)) {
    absl::PrintF("  %s\n", line);
  }
}

void PrintSegments(const IndexDescription& index) {
  Table table({{"layer"},
               {"KV head"},
               {"first"},
               {"tokens"},
               {"clusters"},
               {"single"},
               {"largest"},
               {"radius mean"},
               {"radius max"},
               {"index"},
               {"payload"},
               {"labels"}});
  const size_t shown = std::min(index.segments.size(), kSegmentRowsMax);
  for (size_t i = 0; i < shown; ++i) {
    const SegmentSummary& segment = index.segments[i];
    table.Add({absl::StrCat(segment.layer), absl::StrCat(segment.kv_head),
               CountText(segment.first_position), CountText(segment.token_count),
               CountText(segment.cluster_count), CountText(segment.singleton_count),
               CountText(segment.size_max), absl::StrFormat("%.3g", segment.radius_mean),
               absl::StrFormat("%.3g", segment.radius_max), BytesText(segment.index_bytes),
               BytesText(segment.payload_bytes), segment.given_labels ? "given" : "own"});
  }
  absl::PrintF("\nSegments\n%s", table.Render(2));
  const uint64_t left = index.segments.size() - shown + index.segments_left_off;
  if (left > 0) {
    absl::PrintF("  ... and %s more (--layer and --head choose)\n", CountText(left));
  }
}

// Tokens are counted once, the steady zone in each index: of several, their mean is comparable.
std::string TokensText(const IndexDescription& index) {
  const uint64_t steady = index.index_count == 0
                              ? 0
                              : (index.steady_tokens + index.index_count / 2) / index.index_count;
  return absl::StrCat(
      CountText(index.token_count), ", ", CountText(steady), " of them in the steady zone",
      index.index_count > 1 ? absl::StrCat(" (mean of ", CountText(index.index_count),
                                           " indexes: one for each layer and KV head)")
                            : "");
}

void PrintIndex(uint64_t sequence_id, const std::string& where, const IndexDescription& index) {
  absl::PrintF("Sequence %d, %s, generation %d, version %d%s\n", sequence_id, where,
               index.generation, index.version, index.building ? " (building)" : "");
  absl::PrintF("  tokens     %s\n", TokensText(index));
  absl::PrintF("  segments   %s\n", CountText(index.segments.size() + index.segments_left_off));
  absl::PrintF("  clusters   %s, imbalance %.3f (1 is even)\n", CountText(index.cluster_count),
               index.imbalance);
  absl::PrintF("  bytes      index %s, payload %s, pool %s (%s of the payload)\n",
               BytesText(index.index_bytes), BytesText(index.payload_bytes),
               BytesText(index.pool_bytes),
               ShareText(static_cast<double>(index.pool_bytes), index.payload_bytes));
  PrintHistogram("Tokens per cluster", index.sizes, /*whole=*/true);
  PrintHistogram("Radius of a cluster", index.radii, /*whole=*/false);
  if (!index.segments.empty()) PrintSegments(index);
}

std::string PositionsText(const std::vector<uint64_t>& positions, uint32_t size) {
  const size_t shown = std::min(positions.size(), kPositionsShown);
  std::string text = absl::StrJoin(positions.begin(), positions.begin() + shown, " ");
  if (shown < size) absl::StrAppend(&text, " …");
  return text;
}

std::string WhereText(std::optional<uint32_t> layer, std::optional<uint32_t> kv_head) {
  return absl::StrCat(layer.has_value() ? absl::StrCat("layer ", *layer) : "all layers", ", ",
                      kv_head.has_value() ? absl::StrCat("KV head ", *kv_head) : "all KV heads");
}

}  // namespace

absl::StatusOr<Budget> ParseBudget(const std::string& text) {
  const size_t equals = text.find('=');
  const std::string kind = text.substr(0, equals);
  Budget budget;
  if (kind == "ratio") {
    budget.kind = Budget::Kind::kRatio;
  } else if (kind == "clusters") {
    budget.kind = Budget::Kind::kClusters;
  } else if (kind == "coverage") {
    budget.kind = Budget::Kind::kCoverage;
  } else if (kind == "error") {
    budget.kind = Budget::Kind::kError;
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("budget \"", text, "\": expected ratio=R, clusters=N, coverage=P or error=E"));
  }
  if (equals == std::string::npos || !absl::SimpleAtod(text.substr(equals + 1), &budget.value)) {
    return absl::InvalidArgumentError(
        absl::StrCat("budget \"", text, "\": expected a number after \"", kind, "=\""));
  }
  WAVEKV_RETURN_IF_ERROR(CheckBudget(budget));
  return budget;
}

absl::Status RunIndex(const CommandOptions& options, uint64_t sequence_id,
                      std::optional<uint32_t> layer, std::optional<uint32_t> kv_head) {
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
  WAVEKV_ASSIGN_OR_RETURN(const IndexDescription index,
                          admin->DescribeIndex(sequence_id, layer, kv_head));
  if (!options.json) {
    PrintIndex(sequence_id, WhereText(layer, kv_head), index);
    return absl::OkStatus();
  }
  Json json = {{"id", std::to_string(sequence_id)}, {"sequence_id", sequence_id}};
  if (layer.has_value()) json["layer"] = *layer;
  if (kv_head.has_value()) json["kv_head"] = *kv_head;
  json.update(ToJson(index));
  absl::PrintF("%s\n", DumpJson(json));
  return absl::OkStatus();
}

absl::Status RunExplain(const CommandOptions& options, uint64_t sequence_id,
                        const ExplainOptions& explain) {
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
  WAVEKV_ASSIGN_OR_RETURN(const Explanation explanation, admin->Explain(sequence_id, explain));
  if (options.json) {
    Json json = {{"id", std::to_string(sequence_id)},
                 {"sequence_id", sequence_id},
                 {"layer", explain.layer},
                 {"kv_head", explain.kv_head}};
    json.update(ToJson(explanation));
    absl::PrintF("%s\n", DumpJson(json));
    return absl::OkStatus();
  }
  absl::PrintF("Sequence %d, %s, budget %s: %s of %s clusters retrieved\n", sequence_id,
               WhereText(explain.layer, explain.kv_head), Printable(explanation.budget),
               CountText(explanation.retrieval_count), CountText(explanation.cluster_count));
  const std::pair<const char*, double> zones[] = {{"steady", explanation.steady_mass},
                                                  {"retrieval", explanation.retrieval_mass},
                                                  {"estimation", explanation.estimation_mass}};
  absl::PrintF("\nWhere the attention mass truly lies\n");
  for (const auto& [name, mass] : zones) {
    absl::PrintF("  %s │%s│ %s\n", PadRight(name, 10), Bar(mass, kHistogramColumns),
                 PercentText(mass));
  }
  Table table({{"rank"},
               {"segment"},
               {"cluster"},
               {"size"},
               {"radius"},
               {"logit"},
               {"error"},
               {"estimated"},
               {"true"},
               {"zone", Align::kLeft},
               {"positions", Align::kLeft}});
  for (const ExplainedCluster& cluster : explanation.clusters) {
    table.Add({CountText(cluster.rank), CountText(cluster.segment_idx),
               CountText(cluster.cluster_idx), CountText(cluster.size),
               absl::StrFormat("%.3g", cluster.radius), absl::StrFormat("%.2f", cluster.logit_max),
               absl::StrFormat("%.2e", cluster.expected_error), PercentText(cluster.estimated_mass),
               PercentText(cluster.true_mass), Printable(cluster.zone),
               PositionsText(cluster.positions, cluster.size)});
  }
  absl::PrintF("\nClusters by %s (error: what estimating one would do to the output)\n%s",
               Printable(explanation.ranked_by), table.Render(2));
  return absl::OkStatus();
}

absl::Status RunRecall(const CommandOptions& options, uint64_t sequence_id,
                       const std::vector<uint32_t>& layers, const std::optional<Budget>& budget) {
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
  WAVEKV_ASSIGN_OR_RETURN(const RecallSample sample,
                          admin->SampleRecall(sequence_id, layers, budget));
  if (options.json) {
    Json json = {{"id", std::to_string(sequence_id)}, {"sequence_id", sequence_id}};
    json.update(ToJson(sample));
    absl::PrintF("%s\n", DumpJson(json));
    return absl::OkStatus();
  }
  absl::PrintF(
      "Sequence %d, generation %d, version %d: the last query of each layer, exact beside "
      "approximate\n\n",
      sequence_id, sample.generation, sample.version);
  Table table({{"layer"},
               {"mass covered", Align::kLeft},
               {"mean"},
               {"least"},
               {"error mean"},
               {"error max"},
               {"bytes read"}});
  for (const LayerRecall& layer : sample.layers) {
    if (!layer.sampled) {
      table.Add({absl::StrCat(layer.layer), "(no query yet)", "", "", "", "", ""});
      continue;
    }
    table.Add({absl::StrCat(layer.layer), Bar(layer.mass_covered_mean, kHistogramColumns / 2),
               PercentText(layer.mass_covered_mean), PercentText(layer.mass_covered_min),
               PercentText(layer.rel_error_mean), PercentText(layer.rel_error_max),
               PercentText(layer.kv_bytes_read_ratio)});
  }
  absl::PrintF("%s", table.Render(2));
  return absl::OkStatus();
}

}  // namespace wavekv::client
