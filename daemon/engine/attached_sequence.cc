#include "daemon/engine/attached_sequence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Fewer tokens of a layer wait until no more come: each transfer has its price.
constexpr uint64_t kCopyTokensMin = 16;
constexpr uint64_t kCopyTokensMax = 1024;  // Of one transfer.

}  // namespace

AttachedSequence::AttachedSequence(std::shared_ptr<Sequence> sequence,
                                   std::unique_ptr<ResidentSequence> resident,
                                   ResidentWindows windows, ClientId client)
    : sequence_(std::move(sequence)),
      client_(client),
      place_(resident->place()),
      resident_(std::move(resident)),
      windows_(std::move(windows)),
      layers_(sequence_->shape().layer_count) {}

AttachedSequence::~AttachedSequence() {
  MutexLock work(&work_mutex_);
  CloseLocked(absl::UnavailableError("the daemon is shutting down"));
}

ResidentWindows AttachedSequence::windows() {
  MutexLock work(&work_mutex_);
  return windows_;
}

bool AttachedSequence::open() const { return state().attached.ok(); }

ResidentState AttachedSequence::state() const {
  MutexLock lock(&state_mutex_);
  return state_;
}

absl::StatusOr<ResidentLayer> AttachedSequence::View(uint32_t layer) const {
  WAVEKV_ASSIGN_OR_RETURN(const LayerSnapshot snapshot, sequence_->Snapshot(Generation(0), layer));
  return ShowLayer(snapshot, windows_, sequence_->Budget(layer), sequence_->spec().index.sketch);
}

absl::Status AttachedSequence::Load() {
  MutexLock work(&work_mutex_);
  const absl::Status loaded = LoadLocked();
  if (!loaded.ok()) CloseLocked(loaded);
  return loaded;
}

absl::Status AttachedSequence::LoadLocked() {
  generation_ = sequence_->Status().generation;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    WAVEKV_ASSIGN_OR_RETURN(const ResidentLayer view, View(layer));
    WAVEKV_RETURN_IF_ERROR(resident_->Load(layer, view));
    layers_[layer] = {view.token_count, view.token_count, view.version, view.steady_first};
  }
  NoteState();
  return absl::OkStatus();
}

bool AttachedSequence::Round() {
  MutexLock work(&work_mutex_);
  if (resident_ == nullptr) return false;
  const bool died = process_->Died();
  absl::StatusOr<bool> copied = CopyOut(died ? Copy::kAll : Copy::kBatches);
  absl::StatusOr<bool> shown = copied.ok() && !died ? Publish() : copied;
  if (died) {
    CloseLocked(absl::UnavailableError("the process that attached it has ended"));
    return true;
  }
  if (!shown.ok()) {
    CloseLocked(shown.status());
    return true;
  }
  NoteState();
  return *copied || *shown;
}

absl::StatusOr<bool> AttachedSequence::CopyOut(Copy copy) {
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<uint64_t> in_place, resident_->Poll());
  bool moved = false;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    Shown& shown = layers_[layer];
    if (in_place[layer] <= shown.token_count) continue;
    moved = true;
    const bool growing = in_place[layer] != std::exchange(shown.polled_count, in_place[layer]);
    const uint64_t waiting = in_place[layer] - shown.token_count;
    if (copy == Copy::kBatches && growing && waiting < kCopyTokensMin) continue;
    WAVEKV_RETURN_IF_ERROR(CopyRows(layer, in_place[layer]));
  }
  return moved;
}

absl::Status AttachedSequence::CopyRows(uint32_t layer, uint64_t end) {
  const ModelShape& shape = sequence_->shape();
  const Sequence::Use use(sequence_);  // Steps use it: it does not idle.
  Shown& shown = layers_[layer];
  while (shown.token_count < end) {
    const uint64_t count = std::min(end - shown.token_count, kCopyTokensMax);
    keys_.resize(count * shape.kv_head_count * shape.key_bytes());
    values_.resize(count * shape.kv_head_count * shape.value_bytes());
    WAVEKV_RETURN_IF_ERROR(resident_->ReadRows(
        layer, shown.token_count, static_cast<uint32_t>(count), keys_.data(), values_.data()));
    const RowBatch batch = {
        .range = {shown.token_count, shown.token_count + count},
        .layers = {layer},
        .keys =
            TensorRows(keys_.data(), Layout::kNHD, count, shape.kv_head_count, shape.key_bytes()),
        .values = TensorRows(values_.data(), Layout::kNHD, count, shape.kv_head_count,
                             shape.value_bytes()),
    };
    WAVEKV_RETURN_IF_ERROR(
        sequence_->Append(generation_, batch, AppendMode::kInsert, nullptr, Writer::kAttachment)
            .status());
    shown.token_count += count;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> AttachedSequence::Publish() {
  bool moved = false;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    Shown& shown = layers_[layer];
    WAVEKV_ASSIGN_OR_RETURN(const LayerSnapshot snapshot, sequence_->Snapshot(generation_, layer));
    // Where a version's segments end the ring begins, and rows that it has let go are lost.
    if (snapshot.version->number() == shown.version ||
        snapshot.version->clustered_end() < shown.steady_first) {
      continue;
    }
    WAVEKV_ASSIGN_OR_RETURN(
        const ResidentLayer view,
        ShowLayer(snapshot, windows_, sequence_->Budget(layer), sequence_->spec().index.sketch));
    const absl::StatusOr<bool> published = resident_->Publish(layer, view);
    // Numbers of blocks that left the index are not free yet: the version that is there stays.
    if (absl::IsResourceExhausted(published.status())) {
      if (std::exchange(shown.refused_version, view.version) != view.version) {
        Log(LogLevel::kInfo, "resident_version_waits",
            {{"sequence", id().value()}, {"layer", layer}, {"error", published.status()}});
      }
      continue;
    }
    WAVEKV_RETURN_IF_ERROR(published.status());
    if (!*published) continue;
    moved = true;
    shown.version = view.version;
    shown.steady_first = view.steady_first;
  }
  return moved;
}

absl::Status AttachedSequence::PrepareWrite() {
  const absl::StatusOr<bool> drained = resident_->Drained();
  absl::Status status = drained.status();
  if (status.ok() && !*drained) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id().value(),
                     " is attached and a step is under way; wait for the stream first"));
  }
  if (status.ok()) status = CopyOut(Copy::kAll).status();
  if (!status.ok()) CloseLocked(status);
  return status;
}

void AttachedSequence::ShowWritten(Generation generation) {
  generation_ = generation;
  const absl::Status loaded = LoadLocked();
  if (loaded.ok()) return;
  CloseLocked(absl::Status(loaded.code(), absl::StrCat("the sequence was written, and cannot be "
                                                       "shown as it is: ",
                                                       loaded.message())));
}

absl::StatusOr<InsertOutcome> AttachedSequence::Insert(Generation generation, const RowBatch& batch,
                                                       ThreadPool* pool) {
  MutexLock work(&work_mutex_);
  if (resident_ == nullptr) {
    return sequence_->Append(generation, batch, AppendMode::kInsert, pool);
  }
  WAVEKV_RETURN_IF_ERROR(PrepareWrite());
  WAVEKV_ASSIGN_OR_RETURN(
      const InsertOutcome outcome,
      sequence_->Append(generation, batch, AppendMode::kInsert, pool, Writer::kAttachment));
  ShowWritten(outcome.generation);
  return outcome;
}

absl::StatusOr<Generation> AttachedSequence::Truncate(Generation generation, uint64_t token_count) {
  MutexLock work(&work_mutex_);
  if (resident_ == nullptr) return sequence_->Truncate(generation, token_count);
  if (token_count < kSinkTokens) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id().value(), " is attached, which takes at least ", kSinkTokens,
                     " tokens; detach it before keeping ", token_count));
  }
  WAVEKV_RETURN_IF_ERROR(PrepareWrite());
  WAVEKV_ASSIGN_OR_RETURN(const Generation bumped,
                          sequence_->Truncate(generation, token_count, Writer::kAttachment));
  ShowWritten(bumped);
  return bumped;
}

absl::Status AttachedSequence::Close(const absl::Status& why) {
  MutexLock work(&work_mutex_);
  if (resident_ == nullptr) return absl::OkStatus();
  const absl::Status stored = CopyOut(Copy::kAll).status();
  CloseLocked(why);
  return stored;
}

void AttachedSequence::CloseLocked(const absl::Status& why) {
  if (resident_ == nullptr) return;
  NoteState();
  process_->Close();
  resident_->Close([process = process_] { return process->Gone(); });
  resident_.reset();
  windows_.clear();  // The client's mappings of them go with its process.
  sequence_->EndAttachment();
  Log(LogLevel::kInfo, "resident_closed",
      {{"tenant", sequence_->tenant()}, {"sequence", id().value()}, {"why", why}});
  MutexLock lock(&state_mutex_);
  state_.attached = why;
}

void AttachedSequence::NoteState() {
  ResidentState state;
  state.generation = generation_;
  state.token_count = state.steady_first = UINT64_MAX;
  for (const Shown& shown : layers_) {
    state.token_count = std::min(state.token_count, shown.token_count);
    state.steady_first = std::min(state.steady_first, shown.steady_first);
  }
  state.counters = resident_->counters();
  MutexLock lock(&state_mutex_);
  state_ = std::move(state);
}

}  // namespace wavekv
