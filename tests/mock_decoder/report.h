// What a run of the mock decoder found out, and how it is told.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/mock_decoder/world.h"

namespace wavekv::mock {

// Fields that a mode does not produce stay unset, and are null in JSON.
struct Report {
  std::string mode;
  std::optional<std::string> path;     // Of the decode: attend, staged or resident.
  std::optional<std::string> backend;  // Of the run's own wavebufferd.
  WorldConfig world;
  uint32_t needles_found = 0;  // By the mode's own attention; by every decoder that forked off too.
  uint32_t needles_asked = 0;
  std::optional<uint32_t> needles_found_exact;
  std::optional<uint32_t> needles_found_steady_only;
  std::optional<uint32_t> needles_planted_steady;  // In the steady zone of the step that asks.
  std::vector<uint64_t> missed_positions;  // Of needles not found although exact attention does.
  std::optional<double> needle_mass_min;   // Under exact attention.
  std::optional<double> logit_std;
  // ||approximate - exact|| / ||exact|| of one layer's output over all query heads.
  std::optional<double> max_rel_error;
  std::optional<double> mean_rel_error;
  std::optional<double> kv_bytes_read_ratio;
  std::optional<double> hit_ratio;  // Of the block cache; unset without a wave buffer.
  double seconds_world = 0;
  std::optional<double> seconds_exact;
  std::optional<double> seconds_prefill;
  std::optional<double> seconds_build;
  std::optional<double> seconds_decode;

  // One line.
  std::string ToJson() const;
  // A few lines for people.
  std::string ToText() const;
};

// Which facts' answers the outputs spell.
std::vector<bool> FoundFacts(const World& world, const std::vector<StepOutput>& outputs);

// Relative error of each (step, layer) of `outputs` against `exact`, in order.
std::vector<double> RelativeErrors(const World& world, const std::vector<StepOutput>& outputs,
                                   const std::vector<StepOutput>& exact);

}  // namespace wavekv::mock
