#include "daemon/engine/sequence.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv {

Sequence::Sequence(SequenceIdentity identity, ClientId owner,
                   std::unique_ptr<SequenceMemory> memory, Builder* builder, const Clock* clock)
    : identity_(std::move(identity)),
      rules_{spec().index.segment_tokens, spec().index.small_segment_tokens},
      dense_(shape().layer_count, false),
      memory_(std::move(memory)),
      builder_(builder),
      clock_(clock),
      layers_(shape().layer_count),
      owner_(owner),
      last_use_ms_(clock->NowMs()) {
  for (const uint32_t layer : spec().index.dense_layers) dense_[layer] = true;
  for (Layer& layer : layers_) layer.version = EmptyVersion();
}

std::shared_ptr<const LayerVersion> Sequence::EmptyVersion() const {
  return std::make_shared<const LayerVersion>(0, SegmentList(), shape().kv_head_count);
}

const ZoneBudget& Sequence::Budget(uint32_t layer) const {
  for (const auto& [budget_layer, budget] : spec().index.layer_budgets) {
    if (budget_layer == layer) return budget;
  }
  return spec().index.budget;
}

absl::Status Sequence::CheckAlive(Generation wanted) const {
  if (ended_) {
    return absl::NotFoundError(absl::StrCat("sequence ", id().value(), " was dropped"));
  }
  if (wanted != Generation(0) && wanted != generation_) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id().value(), ": the call names generation ", wanted.value(),
                     ", the sequence is at generation ", generation_.value()));
  }
  return absl::OkStatus();
}

absl::Status Sequence::CheckWrite(Generation generation, Writer writer) const {
  if (generation == Generation(0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sequence ", id().value(), ": generation is 0; writes must name the generation (",
        generation_.value(), " now)"));
  }
  WAVEKV_RETURN_IF_ERROR(CheckAlive(generation));
  if (attached_ && writer == Writer::kClient) {
    return absl::FailedPreconditionError(absl::StrCat(
        "sequence ", id().value(), " is attached to the wave buffer: its tokens are appended by ",
        "steps on the device; detach it first"));
  }
  return absl::OkStatus();
}

absl::Status Sequence::CheckGeneration(Generation wanted) const {
  MutexLock lock(&mutex_);
  return CheckAlive(wanted);
}

LayerSnapshot Sequence::SnapshotLocked(uint32_t layer) const {
  const Layer& state = layers_[layer];
  return {&shape(),           generation_,          state.content.token_count,
          state.content.sink, state.content.chunks, state.version,
          state.last_queries};
}

absl::StatusOr<LayerSnapshot> Sequence::Snapshot(Generation wanted, uint32_t layer) const {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckAlive(wanted));
  return SnapshotLocked(layer);
}

absl::StatusOr<std::vector<LayerSnapshot>> Sequence::SnapshotAll(Generation wanted) const {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckAlive(wanted));
  std::vector<LayerSnapshot> snapshots;
  snapshots.reserve(layers_.size());
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    snapshots.push_back(SnapshotLocked(layer));
  }
  return snapshots;
}

uint64_t Sequence::TokenCountLocked() const {
  uint64_t count = layers_.front().content.token_count;
  for (const Layer& layer : layers_) count = std::min(count, layer.content.token_count);
  return count;
}

SequenceStatus Sequence::Status() const {
  SequenceStatus status;
  status.id = id();
  status.tenant = tenant();
  status.label = spec().label;
  status.shape = shape();
  status.max_tokens = spec().max_tokens;
  status.reserved_bytes = memory_->reserved_bytes();
  status.wave_buffer = spec().attach_wave_buffer;
  MutexLock lock(&mutex_);
  status.generation = generation_;
  status.owner = owner_;
  status.token_count = TokenCountLocked();
  status.clustered_tokens = UINT64_MAX;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    const Layer& state = layers_[layer];
    status.clustered_tokens =
        std::min(status.clustered_tokens, state.version->clustered_end() - kSinkTokens);
    status.payload_bytes += state.content.token_count * shape().token_bytes();
    status.index_bytes += state.version->index_bytes();
  }
  status.version = version_;
  status.idle_ms = uses_ > 0 ? 0 : static_cast<uint64_t>(clock_->NowMs() - last_use_ms_);
  status.attached = attached_;
  status.pinned = pinned_;
  status.ttl_ms = ttl_ms_;
  status.counters = counters_;
  return status;
}

bool Sequence::building() const {
  MutexLock lock(&mutex_);
  return std::any_of(layers_.begin(), layers_.end(),
                     [](const Layer& layer) { return !layer.builds.idle(); });
}

void Sequence::SetPinned(bool pinned) {
  MutexLock lock(&mutex_);
  pinned_ = pinned;
}

void Sequence::SetTtl(uint64_t ttl_ms) {
  MutexLock lock(&mutex_);
  ttl_ms_ = ttl_ms;
}

bool Sequence::ReleaseOwner(ClientId owner) {
  Remains remains;
  {
    MutexLock lock(&mutex_);
    if (owner_ != owner) return true;
    owner_ = ClientId(0);
    if (pinned_ || ttl_ms_ > 0) return true;
    remains = EndLocked();
  }
  memory_->Close();
  return false;
}

bool Sequence::ended() const {
  MutexLock lock(&mutex_);
  return ended_;
}

bool Sequence::Evictable() const {
  MutexLock lock(&mutex_);
  return owner_ == ClientId(0) && !pinned_ && uses_ == 0;
}

int64_t Sequence::last_use_ms() const {
  MutexLock lock(&mutex_);
  return last_use_ms_;
}

bool Sequence::EndIfExpired() {
  Remains remains;
  {
    MutexLock lock(&mutex_);
    if (ended_ || pinned_ || ttl_ms_ == 0 || uses_ > 0) return false;
    if (static_cast<uint64_t>(clock_->NowMs() - last_use_ms_) < ttl_ms_) return false;
    remains = EndLocked();
  }
  memory_->Close();
  return true;
}

void Sequence::End() {
  Remains remains;
  {
    MutexLock lock(&mutex_);
    remains = EndLocked();
  }
  memory_->Close();
}

Sequence::Remains Sequence::EndLocked() {
  EndRecordingsLocked();
  Remains remains;
  ended_ = true;
  for (Layer& layer : layers_) {
    layer.builds.Truncate(0);
    remains.contents.push_back(std::exchange(layer.content, LayerContent()));
    remains.versions.push_back(std::exchange(layer.version, EmptyVersion()));
    remains.labels.push_back(std::exchange(layer.labels, HeldLabels()));
    layer.last_queries = QueryVectors();
  }
  build_changed_.NotifyAll();
  return remains;
}

void Sequence::AddCounters(const StepCounters& counters) {
  MutexLock lock(&mutex_);
  counters_ += counters;
}

void Sequence::RememberQueries(uint32_t layer, QueryVectors queries) {
  MutexLock lock(&mutex_);
  std::swap(layers_[layer].last_queries, queries);
}

Sequence::Use::Use(std::shared_ptr<Sequence> sequence) : sequence_(std::move(sequence)) {
  MutexLock lock(&sequence_->mutex_);
  ++sequence_->uses_;
  sequence_->last_use_ms_ = sequence_->clock_->NowMs();
}

Sequence::Use::~Use() {
  if (sequence_ == nullptr) return;
  MutexLock lock(&sequence_->mutex_);
  --sequence_->uses_;
  sequence_->last_use_ms_ = sequence_->clock_->NowMs();
}

}  // namespace wavekv
