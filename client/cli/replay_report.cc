#include "client/cli/replay_report.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/step_ratios.h"
#include "client/cli/text.h"

namespace wavekv::client {
namespace {

double Mean(const std::vector<double>& values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

std::string MicrosecondsText(double us) {
  return us < 1000 ? absl::StrFormat("%.0f µs", us) : absl::StrFormat("%.2f ms", us / 1000);
}

void Extend(const std::vector<double>& more, std::vector<double>* values) {
  values->insert(values->end(), more.begin(), more.end());
}

}  // namespace

double Percentile(std::vector<double> values, double rank) {
  if (values.empty()) return 0;
  const auto last = static_cast<double>(values.size() - 1);
  const auto at = values.begin() + static_cast<ptrdiff_t>(std::ceil(rank * last));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

std::vector<double> RelativeErrors(const std::vector<float>& found,
                                   const std::vector<float>& expected, uint32_t head_count) {
  std::vector<double> errors;
  const size_t dim = expected.size() / head_count;
  for (size_t head = 0; head < head_count; ++head) {
    double distance = 0;
    double norm = 0;
    for (size_t i = head * dim; i < (head + 1) * dim; ++i) {
      distance += std::pow(double{found[i]} - double{expected[i]}, 2);
      norm += std::pow(double{expected[i]}, 2);
    }
    errors.push_back(norm > 0 ? std::sqrt(distance / norm) : std::sqrt(distance));
  }
  return errors;
}

void LayerReport::AddStep(const StepCounters& counters, double latency_us) {
  counters_ += counters;
  latencies_us_.push_back(latency_us);
}

void LayerReport::AddComparison(const std::vector<double>& errors, double mass_mean,
                                double mass_min) {
  Extend(errors, &errors_);
  mass_sum_ += mass_mean;
  mass_min_ = std::min(mass_min_, mass_min);
  ++compared_;
}

void LayerReport::AddRecorded(const std::vector<double>& differences) {
  Extend(differences, &differences_);
}

void LayerReport::Add(const LayerReport& other) {
  counters_ += other.counters_;
  Extend(other.latencies_us_, &latencies_us_);
  Extend(other.errors_, &errors_);
  Extend(other.differences_, &differences_);
  mass_sum_ += other.mass_sum_;
  mass_min_ = std::min(mass_min_, other.mass_min_);
  compared_ += other.compared_;
}

std::vector<std::string> LayerReport::Cells() const {
  const auto compared = [&](double share) {
    return compared_ == 0 ? std::string("–") : PercentText(share);
  };
  return {CountText(step_count()),
          compared(mass_sum_ / static_cast<double>(std::max<uint64_t>(compared_, 1))),
          compared(mass_min_),
          compared(Mean(errors_)),
          compared(Percentile(errors_, 0.99)),
          PercentText(KvBytesReadRatio(counters_)),
          MicrosecondsText(Percentile(latencies_us_, 0.5)),
          MicrosecondsText(Percentile(latencies_us_, 0.99)),
          differences_.empty() ? "–" : absl::StrFormat("%.1e", Percentile(differences_, 1))};
}

Json LayerReport::ToJson() const {
  Json json = {{"steps", step_count()},
               {"compared_steps", compared_},
               {"kv_bytes_read_ratio", KvBytesReadRatio(counters_)},
               {"latency_us_p50", Percentile(latencies_us_, 0.5)},
               {"latency_us_p99", Percentile(latencies_us_, 0.99)}};
  if (compared_ > 0) {
    json["mass_covered_mean"] = mass_sum_ / static_cast<double>(compared_);
    json["mass_covered_min"] = mass_min_;
    json["rel_error_mean"] = Mean(errors_);
    json["rel_error_p99"] = Percentile(errors_, 0.99);
  }
  if (!differences_.empty()) {
    json["recorded_difference_mean"] = Mean(differences_);
    json["recorded_difference_max"] = Percentile(differences_, 1);
  }
  return json;
}

std::string ReplayText(const ReplayReport& report) {
  Table table({{"layer"},
               {"steps"},
               {"mass covered"},
               {"least"},
               {"error mean"},
               {"error p99"},
               {"bytes read"},
               {"p50"},
               {"p99"},
               {"recorded ±"}});
  LayerReport total;
  for (const auto& [layer, layer_report] : report.layers) {
    std::vector<std::string> cells = layer_report.Cells();
    cells.insert(cells.begin(), absl::StrCat(layer));
    table.Add(std::move(cells));
    total.Add(layer_report);
  }
  std::vector<std::string> cells = total.Cells();
  cells.insert(cells.begin(), "all");
  table.Add(std::move(cells));
  std::string text = absl::StrCat(table.Render(2), "\n  ", CountText(report.tokens_inserted),
                                  " tokens of layers, ", CountText(report.builds), " builds, ",
                                  CountText(report.truncates), " truncates");
  if (report.overtaken > 0) {
    absl::StrAppend(&text, "; ", CountText(report.overtaken),
                    " steps left out, overtaken while they were recorded");
  }
  if (report.stopped) absl::StrAppend(&text, "; stopped before the trace's end");
  if (report.cut) absl::StrAppend(&text, "; the trace is cut: its end is missing");
  absl::StrAppend(&text, ".\n");
  return text;
}

Json ToJson(const ReplayReport& report) {
  Json layers = Json::array();
  LayerReport total;
  for (const auto& [layer, layer_report] : report.layers) {
    Json json = {{"layer", layer}};
    json.update(layer_report.ToJson());
    layers.push_back(std::move(json));
    total.Add(layer_report);
  }
  return {{"total", total.ToJson()},
          {"layers", std::move(layers)},
          {"tokens_inserted", report.tokens_inserted},
          {"builds", report.builds},
          {"truncates", report.truncates},
          {"steps_overtaken", report.overtaken},
          {"cut", report.cut},
          {"stopped", report.stopped}};
}

}  // namespace wavekv::client
