// Layers of a trace in memory, for who studies them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/trace/trace_reader.h"
#include "storage/trace/trace_records.h"

namespace wavekv {

// One layer as it was at the end of its trace.
struct LayerTrace {
  uint32_t layer = 0;
  uint64_t stored_count = 0;  // Tokens that were there when the recording began.
  uint64_t token_count = 0;
  std::vector<std::byte> keys;    // [token_count, kv_heads, key_dim], the sequence's dtype
  std::vector<std::byte> values;  // [token_count, kv_heads, value_dim], likewise
  // The layer's steps in order: the first token_counts[i] tokens are those that step i saw. Steps
  // that saw tokens which a truncate took away are left out.
  std::vector<uint64_t> token_counts;  // [steps]
  std::vector<float> queries;          // [steps, query_heads, key_dim]
};

struct LayerTraces {
  TraceSequence sequence;
  std::vector<LayerTrace> layers;  // In the order asked for.
  bool cut = false;                // The file's end is missing.
};

// Reads these layers (none named: all of the trace) of a trace file in one pass. InvalidArgument: a
// layer that the trace does not hold. Otherwise fails as TraceReader does.
absl::StatusOr<LayerTraces> LoadLayerTraces(const std::string& path,
                                            std::span<const uint32_t> layers,
                                            const TraceReadOptions& options = TraceReadOptions());

}  // namespace wavekv
