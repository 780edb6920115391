#include "daemon/engine/recording.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace wavekv {
namespace {

// What the queue and the allocator take for an event beside its vectors.
constexpr uint64_t kEventBytes = sizeof(RecordedEvent) + 64;

uint64_t BytesOf(const RecordedStep& step) {
  return kEventBytes + (step.queries.count + step.out.size() + step.lse.size()) * sizeof(float);
}

}  // namespace

TraceBudget TraceBudgetOf(const ZoneBudget& budget) {
  TraceBudget trace;
  switch (budget.kind) {
    case BudgetKind::kRatio:
      trace.kind = TraceBudgetKind::kRatio;
      break;
    case BudgetKind::kClusters:
      trace.kind = TraceBudgetKind::kClusters;
      break;
    case BudgetKind::kCoverage:
      trace.kind = TraceBudgetKind::kCoverage;
      break;
    case BudgetKind::kError:
      trace.kind = TraceBudgetKind::kError;
      break;
  }
  trace.value = budget.value;
  trace.clusters_max = budget.clusters_max;
  trace.estimate_ratio = budget.estimate_ratio;
  trace.sketch_clusters = budget.sketch_clusters;
  return trace;
}

int64_t Recording::NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Recording::Recording(SequenceId id, std::vector<uint32_t> layers, uint64_t steps,
                     uint64_t queue_bytes_max)
    : id_(id),
      layers_(std::move(layers)),
      steps_(steps),
      queue_bytes_max_(queue_bytes_max),
      began_us_(NowUs()) {
  for (const uint32_t layer : layers_) step_counts_[layer] = 0;
}

bool Recording::Records(uint32_t layer) const {
  return std::binary_search(layers_.begin(), layers_.end(), layer);
}

void Recording::PushLocked(RecordedEvent event, uint64_t bytes) {
  if (finished_ || !failed_.ok()) return;
  if (queued_bytes_ + bytes > queue_bytes_max_) {
    failed_ = absl::ResourceExhaustedError(absl::StrCat(
        "the recording of sequence ", id_.value(), " fell behind: after ", step_count_,
        " steps of layers, ", queued_bytes_, " bytes were waiting to be read, and ", bytes,
        " more pass the ", queue_bytes_max_,
        " of --recording_queue_bytes; record fewer layers, to a faster disk, or raise it"));
    queue_.clear();
    queued_bytes_ = 0;
  } else {
    queue_.push_back({std::move(event), bytes});
    queued_bytes_ += bytes;
  }
  changed_.NotifyAll();
}

void Recording::AddRows(RecordedRows rows) {
  if (!Records(rows.layer) || rows.range.begin >= rows.range.end) return;
  MutexLock lock(&mutex_);
  PushLocked(std::move(rows), kEventBytes);
}

void Recording::AddStep(const std::shared_ptr<const RecordedStep>& step) {
  if (!Records(step->layer)) return;
  MutexLock lock(&mutex_);
  if (finished_ || !failed_.ok()) return;
  uint64_t& count = step_counts_.at(step->layer);
  // A layer that is ahead by a whole step: another one has no steps.
  if (steps_ > 0 && count == steps_) return FinishLocked(TraceEndReason::kSteps);
  PushLocked(step, BytesOf(*step));
  if (!failed_.ok()) return;
  ++count;
  ++step_count_;
  const bool done = std::all_of(step_counts_.begin(), step_counts_.end(),
                                [&](const auto& entry) { return entry.second >= steps_; });
  if (steps_ > 0 && done) FinishLocked(TraceEndReason::kSteps);
}

void Recording::AddBuild(Generation generation) {
  MutexLock lock(&mutex_);
  PushLocked(TraceBuild{generation.value()}, kEventBytes);
}

void Recording::AddTruncate(Generation generation, uint64_t token_count) {
  MutexLock lock(&mutex_);
  PushLocked(TraceTruncate{generation.value(), token_count}, kEventBytes);
}

void Recording::KeepRows(const std::vector<LayerSnapshot>& snapshots) {
  std::map<uint32_t, std::shared_ptr<const LayerSnapshot>> kept;  // One for all rows of a layer.
  MutexLock lock(&mutex_);
  for (Queued& queued : queue_) {
    auto* const rows = std::get_if<RecordedRows>(&queued.event);
    if (rows == nullptr || rows->kept != nullptr) continue;
    std::shared_ptr<const LayerSnapshot>& snapshot = kept[rows->layer];
    if (snapshot == nullptr) {
      snapshot = std::make_shared<const LayerSnapshot>(snapshots[rows->layer]);
    }
    rows->kept = snapshot;
  }
}

void Recording::Finish(TraceEndReason reason) {
  MutexLock lock(&mutex_);
  FinishLocked(reason);
}

void Recording::FinishLocked(TraceEndReason reason) {
  if (finished_ || !failed_.ok()) return;
  queue_.push_back({TraceEnd{reason, step_count_}, 0});
  finished_ = true;
  changed_.NotifyAll();
}

void Recording::Cancel() {
  MutexLock lock(&mutex_);
  failed_ = absl::CancelledError("nobody reads the recording any more");
  queue_.clear();
  queued_bytes_ = 0;
  changed_.NotifyAll();
}

absl::StatusOr<RecordedEvent> Recording::Take() {
  MutexLock lock(&mutex_);
  while (failed_.ok() && queue_.empty()) changed_.Wait(&mutex_);
  if (!failed_.ok()) return failed_;
  if (std::holds_alternative<RecordedRows>(queue_.front().event)) return queue_.front().event;
  absl::StatusOr<RecordedEvent> event = std::move(queue_.front().event);
  queued_bytes_ -= queue_.front().bytes;
  queue_.pop_front();
  return event;
}

void Recording::DropRows() {
  MutexLock lock(&mutex_);
  if (queue_.empty()) return;  // Cancelled or failed meanwhile.
  queued_bytes_ -= queue_.front().bytes;
  queue_.pop_front();
}

bool Recording::ready() const {
  MutexLock lock(&mutex_);
  return !failed_.ok() || !queue_.empty();
}

uint64_t Recording::queued_bytes() const {
  MutexLock lock(&mutex_);
  return queued_bytes_;
}

}  // namespace wavekv
