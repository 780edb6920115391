// What is checked of a request before the engine touches anything.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/engine/layer_snapshot.h"
#include "daemon/engine/segment_labels.h"
#include "daemon/engine/tensor_rows.h"
#include "daemon/engine/types.h"

namespace wavekv {

// InvalidArgument naming the field, what was found and what is allowed; `tokens_max` is the
// engine's limit for one sequence.
absl::Status ValidateSpec(const SequenceSpec& spec, uint64_t tokens_max);

// Shapes, dtype and layers of a chunk for a sequence of this shape. InvalidArgument. That its
// numbers are finite is checked of what is copied from it.
absl::StatusOr<RowBatch> ReadInsertChunk(const ModelShape& shape, const InsertChunk& chunk);

// The token that an Attend appends: keys [kv_heads, key_dim], values [kv_heads, value_dim].
absl::StatusOr<RowBatch> ReadAppend(const ModelShape& shape, const AttendStep& step);

// Query vectors [head_count, key_dim] of any dtype as floats. InvalidArgument names the first
// query head with a NaN or an infinity.
absl::StatusOr<QueryVectors> ReadQueries(const ModelShape& shape, const TensorView& queries,
                                         uint32_t head_count);

// InvalidArgument: `name` hold what no key or value may be.
absl::Status NotFiniteError(absl::string_view name, uint32_t layer, uint64_t position,
                            uint32_t kv_head, size_t element);

// InvalidArgument: labels of more segments in one call than such a sequence's index can have.
absl::Status ValidateLabelCount(const SequenceSpec& spec, uint64_t segments);

// A copy of the labels of a segment of such a sequence. InvalidArgument: positions beyond
// max_tokens, another length, or a label that is not below ClusterCountFor its tokens.
absl::StatusOr<GivenLabels> ReadLabels(const SequenceSpec& spec, const LabelRange& segment);

absl::Status ValidateLayer(const ModelShape& shape, uint32_t layer);

}  // namespace wavekv
