#include "daemon/engine/builder.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr int kNice = 10;
// How long a build waits for memory that readers of a replaced version hold: steps take less.
constexpr std::chrono::milliseconds kReadersMax(250);
constexpr std::chrono::milliseconds kReadersPoll(2);

}  // namespace

Builder::Builder(const BuilderOptions& options, ComputeBackend* backend, StepPriority* steps,
                 IndexGauge gauge)
    : queue_max_(options.queue_max),
      backend_(backend),
      steps_(steps),
      gauge_(std::move(gauge)),
      pool_(ThreadPoolOptions{.thread_count = static_cast<int>(options.thread_count),
                              .name = "wavekv-build",
                              .queue_max = options.queue_max,
                              .nice = kNice}) {}

Builder::~Builder() { stopping_ = true; }

void Builder::Schedule(std::shared_ptr<Sequence> sequence, uint32_t layer) {
  const absl::Status submitted =
      pool_.TrySubmit([this, sequence, layer] { RunLayer(sequence, layer); });
  if (submitted.ok()) return;
  sequence->Unschedule(layer, absl::UnavailableError(absl::StrCat(
                                  "the build queue is full (", queue_max_,
                                  " layers); the tokens stay exact until a later BuildIndex")));
}

void Builder::RunLayer(const std::shared_ptr<Sequence>& sequence, uint32_t layer) {
  while (!stopping_ && BuildNext(sequence, layer)) {
    // Others first; with a full queue the layer goes on here.
    if (pool_.TrySubmit([this, sequence, layer] { RunLayer(sequence, layer); }).ok()) return;
  }
}

bool Builder::BuildNext(const std::shared_ptr<Sequence>& sequence, uint32_t layer) {
  {
    MutexLock lock(&mutex_);
    building_.insert(sequence.get());
  }
  bool more = false;
  absl::StatusOr<StartedJob> started = sequence->StartJob(layer);
  if (started.ok()) {
    absl::StatusOr<std::shared_ptr<const Segment>> segment =
        BuildSegment(*sequence, layer, *started->job, started->snapshot);
    if (!segment.ok() && !started->job->cancelled && !stopping_) {
      Log(LogLevel::kWarning, "segment_build_failed",
          {{"sequence", sequence->id().value()}, {"layer", layer}, {"status", segment.status()}});
    }
    // The rows that the new segment replaces go with the last reader, not with this snapshot.
    started->snapshot = LayerSnapshot();
    more = sequence->FinishJob(layer, *started->job, std::move(segment));
  }
  MutexLock lock(&mutex_);
  building_.erase(building_.find(sequence.get()));
  build_ended_.NotifyAll();
  return more;
}

bool Builder::WaitForDropped(int64_t timeout_ms) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  const auto holds_memory = [](const Sequence* sequence) { return sequence->ended(); };
  bool waited = false;
  MutexLock lock(&mutex_);
  while (std::any_of(building_.begin(), building_.end(), holds_memory)) {
    waited = true;
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) break;
    build_ended_.WaitFor(&mutex_, left);
  }
  return waited;
}

absl::StatusOr<RowMemory> Builder::AllocateSegment(Sequence& sequence, uint32_t layer,
                                                   const BuildJob& job) {
  const auto deadline = std::chrono::steady_clock::now() + kReadersMax;
  while (true) {
    absl::StatusOr<RowMemory> memory = sequence.memory()->AllocateSegment(layer, job.range);
    if (!absl::IsResourceExhausted(memory.status()) || job.cancelled || stopping_ ||
        std::chrono::steady_clock::now() >= deadline) {
      return memory;
    }
    MutexLock lock(&mutex_);
    build_ended_.WaitFor(&mutex_, kReadersPoll);
  }
}

absl::StatusOr<std::shared_ptr<const Segment>> Builder::BuildSegment(
    Sequence& sequence, uint32_t layer, const BuildJob& job, const LayerSnapshot& snapshot) {
  const ModelShape& shape = sequence.shape();
  const TokenRange range = job.range;
  const uint64_t keys_bytes = range.size() * shape.key_bytes();
  const uint64_t values_bytes = range.size() * shape.value_bytes();
  WAVEKV_ASSIGN_OR_RETURN(const RowMemory memory, AllocateSegment(sequence, layer, job));
  ClusterOptions options;
  options.sketch = sequence.spec().index.sketch;
  options.tokens_per_cluster = sequence.spec().index.tokens_per_cluster;
  options.iterations = sequence.spec().index.kmeans_iterations;
  options.pause = [this] { steps_->LetStepsPass(); };

  std::vector<std::byte> keys(keys_bytes);
  std::vector<std::byte> values(values_bytes);
  std::vector<SegmentHead> heads;
  for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
    if (!stopping_) steps_->LetStepsPass();
    if (job.cancelled || stopping_) return absl::CancelledError("the build was given up");
    snapshot.VisitRows(
        head, range, [&](uint64_t position, const std::byte* key, const std::byte* value) {
          const uint64_t row = position - range.begin;
          std::memcpy(keys.data() + row * shape.key_bytes(), key, shape.key_bytes());
          std::memcpy(values.data() + row * shape.value_bytes(), value, shape.value_bytes());
        });
    std::byte* const keys_out = memory.base + head * (keys_bytes + values_bytes);
    ClusterInput input = {range.begin,   static_cast<uint32_t>(range.size()),
                          shape.key_dim, shape.value_dim,
                          shape.dtype,   keys.data(),
                          values.data(), {}};
    if (job.labels != nullptr) input.labels = job.labels->head(head);
    WAVEKV_ASSIGN_OR_RETURN(
        SegmentHead clustered,
        backend_->ClusterSegment(input, options, keys_out, keys_out + keys_bytes));
    clustered.uid = next_uid_.fetch_add(1);
    clustered.payload_owner = memory.owner;
    heads.push_back(std::move(clustered));
  }
  return std::make_shared<const Segment>(range, std::move(heads),
                                         shape.kv_head_count * (keys_bytes + values_bytes), gauge_);
}

}  // namespace wavekv
