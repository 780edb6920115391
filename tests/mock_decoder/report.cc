#include "tests/mock_decoder/report.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "tests/mock_decoder/json_object.h"

namespace wavekv::mock {
namespace {

template <class T>
void AddOptional(std::string_view name, const std::optional<T>& value, JsonObject* json) {
  value.has_value() ? json->Add(name, *value) : json->AddNull(name);
}

template <class T>
void AppendLine(absl::string_view name, const std::optional<T>& value, std::string* text) {
  if (value.has_value()) absl::StrAppendFormat(text, "%-28s %s\n", name, absl::StrCat(*value));
}

}  // namespace

std::string Report::ToJson() const {
  JsonObject json;
  json.Add("mode", mode);
  AddOptional("path", path, &json);
  AddOptional("backend", backend, &json);
  json.Add("tokens", world.token_count);
  json.Add("seed", world.model.seed);
  json.Add("dtype", DTypeName(world.model.dtype));
  json.Add("layers", world.model.layer_count);
  json.Add("query_heads", world.model.query_head_count());
  json.Add("kv_heads", world.model.kv_head_count);
  json.Add("needles_found", needles_found);
  json.Add("needles_asked", needles_asked);
  AddOptional("needles_found_exact", needles_found_exact, &json);
  AddOptional("needles_found_steady_only", needles_found_steady_only, &json);
  AddOptional("needles_planted_steady", needles_planted_steady, &json);
  json.Add("missed_positions", missed_positions);
  AddOptional("needle_mass_min", needle_mass_min, &json);
  AddOptional("logit_std", logit_std, &json);
  AddOptional("max_rel_error", max_rel_error, &json);
  AddOptional("mean_rel_error", mean_rel_error, &json);
  AddOptional("kv_bytes_read_ratio", kv_bytes_read_ratio, &json);
  AddOptional("hit_ratio", hit_ratio, &json);
  json.Add("seconds_world", seconds_world);
  AddOptional("seconds_exact", seconds_exact, &json);
  AddOptional("seconds_prefill", seconds_prefill, &json);
  AddOptional("seconds_build", seconds_build, &json);
  AddOptional("seconds_decode", seconds_decode, &json);
  return json.ToString();
}

std::string Report::ToText() const {
  std::string text =
      absl::StrFormat("%d tokens, %d layers, %d query heads, %d KV heads, seed %d\n",
                      world.token_count, world.model.layer_count, world.model.query_head_count(),
                      world.model.kv_head_count, world.model.seed);
  AppendLine("path of the decode", path, &text);
  AppendLine("wave buffer", backend, &text);
  absl::StrAppendFormat(&text, "%-28s %d of %d\n", "needles found", needles_found, needles_asked);
  AppendLine("  by exact attention", needles_found_exact, &text);
  AppendLine("  by the steady zone alone", needles_found_steady_only, &text);
  AppendLine("  planted in the steady zone", needles_planted_steady, &text);
  if (!missed_positions.empty()) {
    absl::StrAppend(&text, "missed at positions ", absl::StrJoin(missed_positions, ", "), "\n");
  }
  AppendLine("smallest mass of a needle", needle_mass_min, &text);
  AppendLine("spread of a query's logits", logit_std, &text);
  AppendLine("largest relative error", max_rel_error, &text);
  AppendLine("mean relative error", mean_rel_error, &text);
  AppendLine("share of KV bytes read", kv_bytes_read_ratio, &text);
  AppendLine("block cache hit ratio", hit_ratio, &text);
  absl::StrAppendFormat(&text, "%-28s %.2f\n", "seconds to make the context", seconds_world);
  AppendLine("seconds of exact attention", seconds_exact, &text);
  AppendLine("seconds of prefill", seconds_prefill, &text);
  AppendLine("seconds of building", seconds_build, &text);
  AppendLine("seconds of decoding", seconds_decode, &text);
  return text;
}

std::vector<bool> FoundFacts(const World& world, const std::vector<StepOutput>& outputs) {
  std::vector<bool> found;
  found.reserve(outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    found.push_back(world.model().Decode(outputs[i]) == world.facts()[i].answer);
  }
  return found;
}

std::vector<double> RelativeErrors(const World& world, const std::vector<StepOutput>& outputs,
                                   const std::vector<StepOutput>& exact) {
  const ModelConfig& model = world.config().model;
  const size_t layer_floats = static_cast<size_t>(model.query_head_count()) * kHeadDim;
  std::vector<double> errors;
  for (size_t step = 0; step < outputs.size(); ++step) {
    for (uint32_t layer = 0; layer < model.layer_count; ++layer) {
      double difference = 0;
      double norm = 0;
      for (size_t i = layer * layer_floats; i < (layer + 1) * layer_floats; ++i) {
        const double delta = outputs[step][i] - exact[step][i];
        difference += delta * delta;
        norm += static_cast<double>(exact[step][i]) * exact[step][i];
      }
      errors.push_back(std::sqrt(difference / norm));
    }
  }
  return errors;
}

}  // namespace wavekv::mock
