// Requests of the wire as values of the engine. Everything that arrives is judged here first: each
// count is bounded, each tensor has the bytes its shape calls for, unknown values are refused.
// What only the engine can know (shapes against the sequence, generations) is left to it.
//
// Views borrow from the message, which must outlive them.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/types.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv {

// All errors are InvalidArgument and name the field.
absl::StatusOr<SequenceRef> ParseSequenceRef(bool has_sequence, const v1::SequenceRef& sequence);
// Unset: nothing. `name` says whose budget it is.
absl::StatusOr<std::optional<ZoneBudget>> ParseBudget(bool has_budget, const v1::Budget& budget,
                                                      std::string_view name);
// A feature that this engine cannot serve is refused by its name.
absl::StatusOr<SequenceSpec> ParseSequenceSpec(const v1::CreateSequenceRequest& request);
absl::Status CheckLabel(std::string_view label);

// Without `sequence`, which only the first message of a stream must name.
absl::StatusOr<InsertChunk> ParseInsertChunk(const v1::InsertRequest& request);
// What is in them is for the engine to check: it knows the sequence's heads and clusters.
std::vector<LabelRange> ParseLabels(const v1::GiveLabelsRequest& request);
absl::StatusOr<LayerQuery> ParseQuery(const v1::QueryRequest& request);
absl::StatusOr<LayerQuery> ParseEstimate(const v1::EstimateRequest& request);
absl::StatusOr<AttendStep> ParseAttendItem(const v1::AttendItem& item);
// Without queries: an empty shape, which means the last ones that the layer has seen.
absl::StatusOr<LayerQuery> ParseExplain(const v1::ExplainRequest& request);

struct RecallRequest {
  SequenceRef sequence;
  std::span<const uint32_t> layers;
  TensorView queries;
  std::optional<ZoneBudget> budget;
};
absl::StatusOr<RecallRequest> ParseSampleRecall(const v1::SampleRecallRequest& request);

}  // namespace wavekv
