#include "storage/trace/trace_state.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr uint64_t kTraceTokensMax = 1ull << 40;

absl::Status CheckBudget(const TraceBudget& budget) {
  const bool known =
      budget.kind >= TraceBudgetKind::kRatio && budget.kind <= TraceBudgetKind::kError;
  if (known && std::isfinite(budget.value) && budget.value >= 0 &&
      std::isfinite(budget.estimate_ratio) && budget.estimate_ratio >= 0 &&
      budget.estimate_ratio <= 1) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("a budget of kind ", static_cast<int>(budget.kind), ", value ", budget.value,
                   ", estimate_ratio ", budget.estimate_ratio,
                   "; expected kind 1 to 4, a value of 0 or more, a ratio from 0 to 1"));
}

absl::Status CheckLayerNumber(uint32_t layer, const ModelShape& shape, const char* where) {
  if (layer < shape.layer_count) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      where, " names layer ", layer, ", the sequence has ", shape.layer_count, " layers"));
}

absl::Status CheckSize(const char* name, size_t found, size_t expected) {
  if (found == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has a size of ", found, ", the shape calls for ", expected));
}

absl::Status CheckTextBytes(const char* name, size_t found, size_t allowed) {
  if (found <= allowed) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has ", found, " bytes, expected at most ", allowed));
}

absl::Status CheckTraceLayers(const TraceSequence& sequence) {
  if (sequence.layers.empty()) return absl::InvalidArgumentError("the trace holds no layer");
  for (size_t i = 0; i < sequence.layers.size(); ++i) {
    const TraceLayer& layer = sequence.layers[i];
    WAVEKV_RETURN_IF_ERROR(CheckLayerNumber(layer.layer, sequence.shape, "the list of layers"));
    if (i > 0 && layer.layer <= sequence.layers[i - 1].layer) {
      return absl::InvalidArgumentError(absl::StrCat("the list of layers has layer ", layer.layer,
                                                     " after layer ", sequence.layers[i - 1].layer,
                                                     ", expected an ascending list"));
    }
    if (layer.token_count > sequence.max_tokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("layer ", layer.layer, " has ", layer.token_count,
                       " tokens, more than max_tokens, ", sequence.max_tokens));
    }
  }
  return absl::OkStatus();
}

}  // namespace

std::string_view TraceEndReasonName(TraceEndReason reason) {
  switch (reason) {
    case TraceEndReason::kSteps:
      return "it has its steps";
    case TraceEndReason::kStopped:
      return "it was stopped";
    case TraceEndReason::kDropped:
      return "the sequence was dropped";
    case TraceEndReason::kDaemonStopped:
      return "the daemon shut down";
  }
  return "unknown";
}

absl::Status ValidateTraceSequence(const TraceSequence& sequence) {
  WAVEKV_RETURN_IF_ERROR(ValidateModelShape(sequence.shape));
  if (sequence.max_tokens == 0 || sequence.max_tokens > kTraceTokensMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_tokens is ", sequence.max_tokens, ", expected 1 to ", kTraceTokensMax));
  }
  if (sequence.generation == 0) {
    return absl::InvalidArgumentError("generation is 0, expected a number above 0");
  }
  WAVEKV_RETURN_IF_ERROR(CheckTextBytes("label", sequence.label.size(), kTraceLabelBytesMax));
  WAVEKV_RETURN_IF_ERROR(
      CheckTextBytes("daemon_version", sequence.daemon_version.size(), kTraceVersionBytesMax));
  WAVEKV_RETURN_IF_ERROR(CheckBudget(sequence.budget));
  if (sequence.layer_budgets.size() > sequence.shape.layer_count ||
      sequence.dense_layers.size() > sequence.shape.layer_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("there are ", sequence.layer_budgets.size(), " layer budgets and ",
                     sequence.dense_layers.size(), " dense layers, more than layers (",
                     sequence.shape.layer_count, ")"));
  }
  for (const auto& [layer, budget] : sequence.layer_budgets) {
    WAVEKV_RETURN_IF_ERROR(CheckLayerNumber(layer, sequence.shape, "a layer budget"));
    WAVEKV_RETURN_IF_ERROR(CheckBudget(budget));
  }
  for (const uint32_t layer : sequence.dense_layers) {
    WAVEKV_RETURN_IF_ERROR(CheckLayerNumber(layer, sequence.shape, "the list of dense layers"));
  }
  return CheckTraceLayers(sequence);
}

TraceState::TraceState(const TraceSequence& sequence)
    : sequence_(sequence), generation_(sequence.generation) {
  for (const TraceLayer& layer : sequence.layers) {
    layers_.emplace(layer.layer, Layer{.stored = layer.token_count});
  }
}

absl::Status TraceState::Admit(const TraceRecord& record) {
  if (ended_) return absl::InvalidArgumentError("a record after the end record");
  return std::visit([this](const auto& held) { return AdmitRecord(held); }, record);
}

absl::Status TraceState::CheckLayer(uint32_t layer) const {
  if (layers_.contains(layer)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("layer ", layer, " is none of the ", layers_.size(), " layers of the trace"));
}

absl::Status TraceState::CheckGeneration(uint64_t generation) const {
  if (generation == generation_) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("generation ", generation, ", the trace is at generation ", generation_));
}

absl::Status TraceState::CheckStored() const {
  if (stored_done_) return absl::OkStatus();
  for (const auto& [number, layer] : layers_) {
    if (layer.token_count == layer.stored) continue;
    return absl::InvalidArgumentError(absl::StrCat("layer ", number, " has rows of ",
                                                   layer.token_count, " stored tokens, of ",
                                                   layer.stored, " that must come first"));
  }
  return absl::OkStatus();
}

absl::Status TraceState::AdmitRecord(const TraceRows& rows) {
  WAVEKV_RETURN_IF_ERROR(CheckLayer(rows.layer));
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(rows.generation));
  const ModelShape& shape = sequence_.shape;
  Layer& layer = layers_.at(rows.layer);
  if (rows.token_count == 0 || rows.first_position != layer.token_count ||
      rows.token_count > sequence_.max_tokens - layer.token_count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rows of ", rows.token_count, " tokens from position ", rows.first_position, " of layer ",
        rows.layer, ", expected 1 to ", sequence_.max_tokens - layer.token_count,
        " tokens from position ", layer.token_count));
  }
  WAVEKV_RETURN_IF_ERROR(CheckSize("keys", rows.keys.size(),
                                   rows.token_count * shape.kv_head_count * shape.key_bytes()));
  WAVEKV_RETURN_IF_ERROR(CheckSize("values", rows.values.size(),
                                   rows.token_count * shape.kv_head_count * shape.value_bytes()));
  if (rows.origin == TraceRowsOrigin::kStored) {
    if (stored_done_ || rows.token_count > layer.stored - layer.token_count) {
      return absl::InvalidArgumentError(
          absl::StrCat("stored rows of layer ", rows.layer, " from position ", rows.first_position,
                       " beyond the ", layer.stored, " that the recording began with"));
    }
  } else {
    WAVEKV_RETURN_IF_ERROR(CheckStored());
    stored_done_ = true;
  }
  layer.token_count += rows.token_count;
  return absl::OkStatus();
}

absl::Status TraceState::AdmitRecord(const TraceStep& step) {
  WAVEKV_RETURN_IF_ERROR(CheckLayer(step.layer));
  WAVEKV_RETURN_IF_ERROR(CheckBudget(step.budget));
  WAVEKV_RETURN_IF_ERROR(CheckStored());
  const bool overtaken = step.generation > 0 && step.generation < generation_;
  if (!overtaken) WAVEKV_RETURN_IF_ERROR(CheckGeneration(step.generation));
  if (!overtaken && step.token_count > token_count(step.layer)) {
    return absl::InvalidArgumentError(absl::StrCat("a step over ", step.token_count,
                                                   " tokens of layer ", step.layer, ", which has ",
                                                   token_count(step.layer)));
  }
  const ModelShape& shape = sequence_.shape;
  const size_t heads = shape.query_head_count;
  const bool answered = step.verb == TraceVerb::kAttend;
  WAVEKV_RETURN_IF_ERROR(CheckSize("queries", step.queries.size(), heads * shape.key_dim));
  WAVEKV_RETURN_IF_ERROR(CheckSize("out", step.out.size(), answered ? heads * shape.value_dim : 0));
  WAVEKV_RETURN_IF_ERROR(CheckSize("lse", step.lse.size(), answered ? heads : 0));
  stored_done_ = true;
  ++step_count_;
  return absl::OkStatus();
}

absl::Status TraceState::AdmitRecord(const TraceBuild& build) {
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(build.generation));
  WAVEKV_RETURN_IF_ERROR(CheckStored());
  stored_done_ = true;
  return absl::OkStatus();
}

absl::Status TraceState::AdmitRecord(const TraceTruncate& truncate) {
  if (truncate.generation <= generation_) {
    return absl::InvalidArgumentError(absl::StrCat("a truncate to generation ", truncate.generation,
                                                   ", expected one above ", generation_));
  }
  WAVEKV_RETURN_IF_ERROR(CheckStored());
  for (const auto& [number, layer] : layers_) {
    if (truncate.token_count <= layer.token_count) continue;
    return absl::InvalidArgumentError(absl::StrCat("a truncate to ", truncate.token_count,
                                                   " tokens, layer ", number, " has ",
                                                   layer.token_count));
  }
  for (auto& [number, layer] : layers_) layer.token_count = truncate.token_count;
  generation_ = truncate.generation;
  stored_done_ = true;
  return absl::OkStatus();
}

absl::Status TraceState::AdmitRecord(const TraceEnd& end) {
  if (end.reason < TraceEndReason::kSteps || end.reason > TraceEndReason::kDaemonStopped) {
    return absl::InvalidArgumentError(
        absl::StrCat("end reason ", static_cast<int>(end.reason), ", expected 1 to 4"));
  }
  WAVEKV_RETURN_IF_ERROR(CheckStored());
  if (end.step_count != step_count_) {
    return absl::InvalidArgumentError(absl::StrCat("the end record counts ", end.step_count,
                                                   " steps, the trace has ", step_count_));
  }
  ended_ = true;
  return absl::OkStatus();
}

}  // namespace wavekv
