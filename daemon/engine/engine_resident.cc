// Attaching a sequence to a resident region, and what follows from it.
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/engine/engine_impl.h"
#include "daemon/engine/resident_view.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// A ring that is full before the next small segment is cut would stop the engine for ever.
absl::Status CheckRing(const SequenceSpec& spec, const ResidentOptions& options) {
  const uint64_t needed = spec.index.small_segment_tokens + kLocalTokens + kRollbackTokens + 1;
  if (options.ring_rows >= needed) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "ring_rows is ", options.ring_rows, ", expected at least ", needed,
      ": small_segment_tokens and the tokens that always stay exact, with one to come"));
}

}  // namespace

// A sequence that was made attachable, until its attachment has taken it over.
class Engine::Impl::Attaching {
 public:
  explicit Attaching(Sequence* sequence) : sequence_(sequence) {}
  ~Attaching() {
    if (sequence_ != nullptr) sequence_->EndAttachment();
  }
  Attaching(const Attaching&) = delete;
  Attaching& operator=(const Attaching&) = delete;
  void Done() { sequence_ = nullptr; }

 private:
  Sequence* sequence_;
};

absl::StatusOr<std::shared_ptr<AttachedSequence>> Engine::Impl::Attach(
    const std::shared_ptr<Sequence>& sequence, ClientId client, const ResidentOptions& region) {
  Attaching attaching(sequence.get());
  ResidentOptions options = region;
  options.segment_tokens = sequence->spec().index.segment_tokens;
  options.small_segment_tokens = sequence->spec().index.small_segment_tokens;
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<LayerSnapshot> layers,
                          sequence->SnapshotAll(Generation(0)));
  const std::shared_ptr<const Arena> own = sequence->memory()->arena();
  if (own == nullptr) {
    return absl::NotFoundError(absl::StrCat("sequence ", sequence->id().value(), " was dropped"));
  }
  WAVEKV_ASSIGN_OR_RETURN(
      std::unique_ptr<ResidentSequence> resident,
      stager->AttachResident(sequence->tenant(), sequence->id(), sequence->shape(),
                             sequence->spec().max_tokens, options));
  auto attached = std::make_shared<AttachedSequence>(sequence, std::move(resident),
                                                     FindWindows(*pool, own, layers), client);
  attaching.Done();
  WAVEKV_RETURN_IF_ERROR(attached->Load());
  return attached;
}

absl::StatusOr<ResidentGrant> Engine::AttachResident(const TenantId& tenant, ClientId client,
                                                     int64_t client_uid, SequenceRef sequence,
                                                     const ResidentOptions& region) {
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> found,
                          impl_->registry.Find(tenant, sequence.id));
  const Sequence::Use use(found);
  if (impl_->stager == nullptr) {
    return absl::FailedPreconditionError(
        "this daemon has no wave buffer; start wavebufferd --backend=cuda and name its socket in "
        "--wave_buffer, or use Attend");
  }
  WAVEKV_RETURN_IF_ERROR(CheckStepsOnDevice(found->spec()));
  WAVEKV_RETURN_IF_ERROR(CheckRing(found->spec(), region));
  // Of a client that has lost the reply, or the process that it was for.
  const std::shared_ptr<AttachedSequence> earlier = impl_->residents.Find(sequence.id);
  if (earlier != nullptr && earlier->client() == client && earlier->process()->Gone()) {
    (void)earlier->Close(absl::AbortedError("its client attached it anew"));  // Nobody steps.
  }
  WAVEKV_RETURN_IF_ERROR(found->BeginAttachment(sequence.generation, client, region.ring_rows));
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<AttachedSequence> attached,
                          impl_->Attach(found, client, region));
  ResidentGrant grant;
  absl::StatusOr<WaveBufferAccess> buffer = impl_->stager->Access(tenant, client_uid);
  if (!buffer.ok()) {
    (void)attached->Close(buffer.status());  // Nobody has appended to it.
    return buffer.status();
  }
  grant.buffer = *std::move(buffer);
  grant.sequence = found->Status();
  grant.place = attached->place();
  grant.ring_rows = region.ring_rows;
  grant.windows = attached->windows();
  grant.process = attached->process();
  impl_->residents.Add(attached);
  // Dropped meanwhile: whoever did that found nothing to close.
  if (found->ended()) impl_->Forget(*found);
  Log(LogLevel::kInfo, "resident_attached",
      {{"tenant", tenant},
       {"sequence", sequence.id.value()},
       {"client", client.value()},
       {"region_bytes", grant.place.region_bytes},
       {"windows", grant.windows.size()}});
  return grant;
}

absl::StatusOr<ResidentState> Engine::ResidentStatus(const TenantId& tenant, SequenceRef sequence,
                                                     uint64_t steady_first_above,
                                                     std::chrono::milliseconds wait) {
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> found,
                          impl_->registry.Find(tenant, sequence.id));
  WAVEKV_RETURN_IF_ERROR(found->CheckGeneration(sequence.generation));
  const std::shared_ptr<AttachedSequence> attached = impl_->residents.Find(sequence.id);
  if (attached == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", sequence.id.value(), " was never attached; attach it first"));
  }
  return impl_->residents.Wait(*attached, steady_first_above, wait);
}

absl::StatusOr<ResidentState> Engine::DetachResident(const TenantId& tenant, ClientId client,
                                                     SequenceRef sequence) {
  WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<Sequence> found,
                          impl_->registry.Find(tenant, sequence.id));
  WAVEKV_RETURN_IF_ERROR(found->CheckGeneration(sequence.generation));
  const std::shared_ptr<AttachedSequence> attached = impl_->residents.Find(sequence.id);
  if (attached == nullptr || !attached->open()) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", sequence.id.value(), " is not attached"));
  }
  if (attached->client() != client) {
    return absl::AbortedError(
        absl::StrCat("sequence ", sequence.id.value(), " is attached by another client"));
  }
  const absl::Status closed = attached->Close(absl::CancelledError("its client has detached it"));
  impl_->residents.Notify();
  WAVEKV_RETURN_IF_ERROR(closed);
  return attached->state();
}

}  // namespace wavekv
