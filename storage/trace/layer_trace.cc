#include "storage/trace/layer_trace.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Collects what the records say of the layers that are wanted.
class Collector {
 public:
  explicit Collector(LayerTraces* traces)
      : traces_(traces), generation_(traces->sequence.generation) {}

  void operator()(TraceRows& rows) {
    LayerTrace* const layer = Find(rows.layer);
    if (layer == nullptr) return;
    layer->token_count += rows.token_count;
    layer->keys.insert(layer->keys.end(), rows.keys.begin(), rows.keys.end());
    layer->values.insert(layer->values.end(), rows.values.begin(), rows.values.end());
  }
  void operator()(const TraceStep& step) {
    LayerTrace* const layer = Find(step.layer);
    if (layer == nullptr || step.generation != generation_) return;
    layer->token_counts.push_back(step.token_count);
    layer->queries.insert(layer->queries.end(), step.queries.begin(), step.queries.end());
  }
  void operator()(const TraceTruncate& truncate) {
    generation_ = truncate.generation;
    for (LayerTrace& layer : traces_->layers) Truncate(truncate.token_count, &layer);
  }
  void operator()(const TraceBuild&) {}
  void operator()(const TraceEnd&) {}

 private:
  LayerTrace* Find(uint32_t layer) {
    const auto found =
        std::find_if(traces_->layers.begin(), traces_->layers.end(),
                     [&](const LayerTrace& candidate) { return candidate.layer == layer; });
    return found == traces_->layers.end() ? nullptr : &*found;
  }

  void Truncate(uint64_t token_count, LayerTrace* layer) {
    const ModelShape& shape = traces_->sequence.shape;
    layer->token_count = token_count;
    layer->keys.resize(token_count * shape.kv_head_count * shape.key_bytes());
    layer->values.resize(token_count * shape.kv_head_count * shape.value_bytes());
    const size_t step_floats = size_t{shape.query_head_count} * shape.key_dim;
    size_t kept = 0;
    for (size_t step = 0; step < layer->token_counts.size(); ++step) {
      if (layer->token_counts[step] > token_count) continue;
      layer->token_counts[kept] = layer->token_counts[step];
      std::copy_n(layer->queries.begin() + static_cast<ptrdiff_t>(step * step_floats), step_floats,
                  layer->queries.begin() + static_cast<ptrdiff_t>(kept * step_floats));
      ++kept;
    }
    layer->token_counts.resize(kept);
    layer->queries.resize(kept * step_floats);
  }

  LayerTraces* const traces_;
  uint64_t generation_;
};

absl::Status AddLayer(uint32_t layer, LayerTraces* traces) {
  for (const TraceLayer& held : traces->sequence.layers) {
    if (held.layer != layer) continue;
    traces->layers.push_back({.layer = layer, .stored_count = held.token_count});
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("layer ", layer, " is none of the ",
                                                 traces->sequence.layers.size(),
                                                 " layers that were recorded"));
}

}  // namespace

absl::StatusOr<LayerTraces> LoadLayerTraces(const std::string& path,
                                            std::span<const uint32_t> layers,
                                            const TraceReadOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<TraceReader> reader,
                          TraceReader::Open(path, options));
  LayerTraces traces;
  traces.sequence = reader->sequence();
  if (layers.empty()) {
    for (const TraceLayer& held : traces.sequence.layers) {
      WAVEKV_RETURN_IF_ERROR(AddLayer(held.layer, &traces));
    }
  }
  for (const uint32_t layer : layers) WAVEKV_RETURN_IF_ERROR(AddLayer(layer, &traces));
  Collector collector(&traces);
  for (;;) {
    WAVEKV_ASSIGN_OR_RETURN(std::optional<TraceRecord> record, reader->Next());
    if (!record.has_value()) break;
    std::visit(collector, *record);
  }
  traces.cut = reader->cut();
  return traces;
}

}  // namespace wavekv
