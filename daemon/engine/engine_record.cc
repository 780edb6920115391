#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/engine.h"
#include "daemon/engine/engine_impl.h"
#include "daemon/engine/recording.h"
#include "daemon/engine/validation.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// The least that an arena's file may have: the queue itself is in process memory.
constexpr uint64_t kArenaFileBytes = 4096;

// Ascending, each once. InvalidArgument: no layer of the model.
absl::StatusOr<std::vector<uint32_t>> LayersToRecord(const ModelShape& shape,
                                                     std::vector<uint32_t> layers) {
  for (const uint32_t layer : layers) WAVEKV_RETURN_IF_ERROR(ValidateLayer(shape, layer));
  if (layers.empty()) {
    layers.resize(shape.layer_count);
    std::iota(layers.begin(), layers.end(), 0u);
  }
  std::sort(layers.begin(), layers.end());
  layers.erase(std::unique(layers.begin(), layers.end()), layers.end());
  return layers;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Recorder>> Engine::Record(const TenantId& tenant,
                                                         SequenceRef sequence,
                                                         const RecordingOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<Sequence> found,
                          impl_->registry.Find(tenant, sequence.id));
  WAVEKV_RETURN_IF_ERROR(found->CheckGeneration(sequence.generation));
  WAVEKV_ASSIGN_OR_RETURN(std::vector<uint32_t> layers,
                          LayersToRecord(found->shape(), options.layers));
  const uint64_t queue_bytes = impl_->options.recording_queue_bytes;
  auto recording =
      std::make_shared<Recording>(sequence.id, std::move(layers), options.steps, queue_bytes);
  WAVEKV_RETURN_IF_ERROR(impl_->recordings.Add(recording.get()));
  absl::StatusOr<std::shared_ptr<Arena>> memory = impl_->pool->CreateArena(
      tenant, kArenaFileBytes, queue_bytes,
      absl::StrCat("recording of sequence ", sequence.id.value(), " (--recording_queue_bytes)"));
  absl::StatusOr<TraceSequence> header = memory.ok()
                                             ? found->StartRecording(sequence.generation, recording)
                                             : absl::StatusOr<TraceSequence>(memory.status());
  if (!header.ok()) {
    impl_->recordings.Remove(recording.get());
    return header.status();
  }
  Log(LogLevel::kInfo, "recording",
      {{"tenant", tenant},
       {"sequence", sequence.id.value()},
       {"layers", recording->layers().size()},
       {"steps", options.steps}});
  return std::make_unique<Recorder>(std::move(found), std::move(recording), *std::move(header),
                                    *std::move(memory), options.rows_bytes_max, &impl_->recordings);
}

}  // namespace wavekv
