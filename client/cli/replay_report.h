// What a replay has measured, layer by layer.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "client/admin.h"
#include "client/cli/json.h"
#include "client/types.h"

namespace wavekv::client {

// Of the steps of one layer, or of several.
class LayerReport {
 public:
  // A step was replayed in so long.
  void AddStep(const StepCounters& counters, double latency_us);
  // One compared with exact attention: per query head, |approximate - exact| / |exact|; and the
  // true share of the attention mass in the steady and retrieval zones.
  void AddComparison(const std::vector<double>& errors, double mass_mean, double mass_min);
  // The recorded answer beside the replayed one, likewise.
  void AddRecorded(const std::vector<double>& differences);
  void Add(const LayerReport& other);

  uint64_t step_count() const { return latencies_us_.size(); }
  // Table cells, without the layer.
  std::vector<std::string> Cells() const;
  Json ToJson() const;

 private:
  StepCounters counters_;
  std::vector<double> latencies_us_;
  std::vector<double> errors_;       // Of every query head compared.
  std::vector<double> differences_;  // Likewise.
  double mass_sum_ = 0;              // Over compared steps.
  double mass_min_ = 1;
  uint64_t compared_ = 0;
};

struct ReplayReport {
  std::map<uint32_t, LayerReport> layers;  // By the layer's number in the recorded sequence.
  uint64_t tokens_inserted = 0;            // Summed over layers, appended ones included.
  uint64_t builds = 0;
  uint64_t truncates = 0;
  // Steps not replayed: a truncate or an append had overtaken them when they were recorded.
  uint64_t overtaken = 0;
  bool cut = false;      // The file's end is missing.
  bool stopped = false;  // Not all of the trace was replayed.
};

std::string ReplayText(const ReplayReport& report);
Json ToJson(const ReplayReport& report);

// |found - expected| / |expected| of each of `head_count` rows; the plain distance where expected
// is 0.
std::vector<double> RelativeErrors(const std::vector<float>& found,
                                   const std::vector<float>& expected, uint32_t head_count);
// The value that a share `rank` (0 ... 1) of the values does not pass; 0 of none.
double Percentile(std::vector<double> values, double rank);

}  // namespace wavekv::client
