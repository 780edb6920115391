#include "client/gpu/resident_batch.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/gpu/mapping_cache.h"
#include "client/gpu/open_sequence.h"
#include "client/gpu/resident_shape.h"
#include "client/gpu/stream_mark.h"
#include "gpu/kernels/cuda_status.h"
#include "gpu/kernels/device_array.h"
#include "gpu/kernels/resolve.h"
#include "gpu/kernels/step_launch.h"
#include "storage/base/mutex.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// A sequence that tokens in a stream may still read.
struct Retired {
  StreamMark mark;  // Of no moment: kept until the batch ends.
  std::shared_ptr<OpenSequence> sequence;
};

bool IsAligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

absl::Status CheckTensors(const ResidentTensors& tensors) {
  const struct {
    const char* name;
    const void* data;
    bool needed;
  } rows[] = {{"queries", tensors.queries, true},
              {"out", tensors.out, true},
              {"lse", tensors.lse, true},
              {"new_keys", tensors.new_keys, tensors.new_values != nullptr},
              {"new_values", tensors.new_values, tensors.new_keys != nullptr}};
  for (const auto& row : rows) {
    if (row.needed && row.data == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(row.name, " is null"));
    }
    if (!IsAligned(row.data)) {
      return absl::InvalidArgumentError(absl::StrCat(
          row.name, " begins at an address that is no multiple of 16; pass a copy of it"));
    }
  }
  return absl::OkStatus();
}

ResidentOutcome OutcomeOfCode(uint32_t code) {
  switch (static_cast<gpu::ResolveCode>(code)) {
    case gpu::ResolveCode::kEmpty:
      return ResidentOutcome::kEmpty;
    case gpu::ResolveCode::kOk:
      return ResidentOutcome::kAttending;
    case gpu::ResolveCode::kClosed:
      return ResidentOutcome::kClosed;
    case gpu::ResolveCode::kDoesNotFit:
      return ResidentOutcome::kDoesNotFit;
    default:
      return ResidentOutcome::kMalformed;
  }
}

}  // namespace

const char* ToString(ResidentOutcome outcome) {
  switch (outcome) {
    case ResidentOutcome::kEmpty:
      return "empty";
    case ResidentOutcome::kPending:
      return "pending";
    case ResidentOutcome::kAttending:
      return "attending";
    case ResidentOutcome::kClosed:
      return "closed";
    case ResidentOutcome::kDoesNotFit:
      return "does not fit";
    default:
      return "malformed";
  }
}

struct ResidentBatch::Impl {
  Impl(const ResidentModel& model, std::shared_ptr<const CudaDevice> on)
      : model(model), device(std::move(on)), cache(device), entries(model.batch) {}

  struct Entry {
    std::shared_ptr<OpenSequence> sequence;  // Null: empty.
    uint32_t tag = 0;                        // Of what was set last.
  };

  absl::Status Allocate(int ordinal);
  absl::Status CheckEntry(uint32_t entry) const;
  absl::Status CheckIsFree(const OpenSequence& sequence, uint32_t entry) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  const ResidentModel model;
  const std::shared_ptr<const CudaDevice> device;
  MappingCache cache;

  gpu::Step step;  // But for the layer's descriptors and tensors.
  gpu::Resolve resolve;
  gpu::DeviceArray<gpu::ResolveEntry> device_entries;
  gpu::DeviceArray<gpu::HeadDescriptor> heads;
  gpu::DeviceArray<gpu::SegmentCopy> segments;
  gpu::DeviceArray<gpu::SequenceDescriptor> live;  // [layers, batch]
  gpu::DeviceArray<uint32_t> reported;
  gpu::DeviceArray<char> workspace;
  gpu::PinnedArray<uint32_t> outcomes;

  mutable Mutex mutex;
  std::vector<Entry> entries ABSL_GUARDED_BY(mutex);  // And their ledgers.
  std::vector<Retired> retired;                       // Of the one thread that sets sequences.
  uint32_t last_tag = 0;                              // Likewise.
};

absl::Status ResidentBatch::Impl::Allocate(int ordinal) {
  step.shape = StepShapeOf(model);
  WAVEKV_RETURN_IF_ERROR(gpu::ValidateShape(step.shape));
  int sm_count = 0;
  WAVEKV_CUDA_RETURN_IF_ERROR(
      cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, ordinal));
  step.splits = gpu::PlanSplits(step.shape, static_cast<uint32_t>(sm_count));
  WAVEKV_ASSIGN_OR_RETURN(
      workspace, gpu::DeviceArray<char>::Make(gpu::WorkspaceBytes(step.shape, step.splits)));
  step.workspace = gpu::LayOutWorkspace(step.shape, step.splits, workspace.data());

  resolve.shape = ResolveShapeOf(model);
  resolve.batch = model.batch;
  const size_t units = gpu::UnitCount(resolve);
  WAVEKV_ASSIGN_OR_RETURN(device_entries, gpu::DeviceArray<gpu::ResolveEntry>::Make(model.batch));
  WAVEKV_ASSIGN_OR_RETURN(heads, gpu::DeviceArray<gpu::HeadDescriptor>::Make(units));
  WAVEKV_ASSIGN_OR_RETURN(segments,
                          gpu::DeviceArray<gpu::SegmentCopy>::Make(units * model.segment_capacity));
  WAVEKV_ASSIGN_OR_RETURN(reported, gpu::DeviceArray<uint32_t>::Make(units));
  WAVEKV_ASSIGN_OR_RETURN(outcomes, gpu::PinnedArray<uint32_t>::Make(units));
  std::ranges::fill(outcomes.span(), 0);
  resolve.entries = device_entries.data();
  resolve.heads = heads.data();
  resolve.segments = segments.data();
  resolve.reported = reported.data();
  resolve.outcomes = outcomes.data();

  // They never change: the resolve kernel writes what they point to.
  std::vector<gpu::SequenceDescriptor> descriptors;
  for (size_t i = 0; i < size_t{model.layer_count} * model.batch; ++i) {
    descriptors.push_back({.version = 0, .heads = heads.data() + i * model.kv_head_count});
  }
  WAVEKV_ASSIGN_OR_RETURN(live, gpu::DeviceArray<gpu::SequenceDescriptor>::Copy(descriptors));
  // What was zeroed above is so for streams that wait for no other.
  return gpu::CudaStatus(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

absl::Status ResidentBatch::Impl::CheckEntry(uint32_t entry) const {
  if (entry < model.batch) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("entry is ", entry, "; allowed: below the batch of ", model.batch));
}

absl::Status ResidentBatch::Impl::CheckIsFree(const OpenSequence& sequence, uint32_t entry) const {
  if (sequence.device() != device.get()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "sequence ", sequence.id(), " was opened by another batch; open it with this one"));
  }
  for (uint32_t i = 0; i < model.batch; ++i) {
    if (i == entry || entries[i].sequence.get() != &sequence) continue;
    return absl::FailedPreconditionError(absl::StrCat("sequence ", sequence.id(), " is entry ", i,
                                                      " of the batch; clear that first"));
  }
  return absl::OkStatus();
}

ResidentBatch::ResidentBatch(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

ResidentBatch::~ResidentBatch() {
  const std::shared_ptr<const CudaDevice> device = impl_->device;
  const CudaDevice::Current current(*device);
  (void)cudaDeviceSynchronize();
  impl_.reset();
}

absl::StatusOr<std::unique_ptr<ResidentBatch>> ResidentBatch::Create(const ResidentModel& model) {
  WAVEKV_ASSIGN_OR_RETURN(const ResidentModel complete, CompleteModel(model));
  WAVEKV_ASSIGN_OR_RETURN(auto driver, CudaDriver::Get());
  int ordinal = 0;
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetDevice(&ordinal));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaFree(nullptr));  // Makes the context, as the engine wants it.
  WAVEKV_ASSIGN_OR_RETURN(const auto identity, CudaDevice::Identify(*driver, ordinal));
  WAVEKV_ASSIGN_OR_RETURN(
      auto device, CudaDevice::Open(std::move(driver), identity, CudaDevice::Waiting::kAsItIs));
  auto impl = std::make_unique<Impl>(complete, std::move(device));
  const CudaDevice::Current current(*impl->device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  WAVEKV_RETURN_IF_ERROR(impl->Allocate(ordinal));
  return std::unique_ptr<ResidentBatch>(new ResidentBatch(std::move(impl)));
}

const ResidentModel& ResidentBatch::model() const { return impl_->model; }
int ResidentBatch::device() const { return impl_->device->identity().device; }
const std::string& ResidentBatch::device_uuid() const { return impl_->device->identity().uuid; }

absl::StatusOr<std::shared_ptr<OpenSequence>> ResidentBatch::Open(
    const ResidentAttachment& attachment, std::chrono::milliseconds timeout) {
  return OpenSequence::Open(impl_->model, impl_->device, &impl_->cache, attachment, timeout);
}

absl::Status ResidentBatch::SetSequence(uint32_t entry, std::shared_ptr<OpenSequence> sequence,
                                        CudaStream stream) {
  WAVEKV_RETURN_IF_ERROR(impl_->CheckEntry(entry));
  const CudaDevice::Current current(*impl_->device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  std::erase_if(impl_->retired, [](const Retired& old) { return old.mark.Reached(); });
  if (sequence != nullptr) {
    MutexLock lock(&impl_->mutex);
    WAVEKV_RETURN_IF_ERROR(impl_->CheckIsFree(*sequence, entry));
  }
  gpu::ResolveEntry told = sequence == nullptr ? gpu::ResolveEntry{} : sequence->entry();
  impl_->last_tag = impl_->last_tag % gpu::kResolveTagMax + 1;
  told.tag = impl_->last_tag;
  WAVEKV_RETURN_IF_ERROR(gpu::LaunchSetEntry(impl_->device_entries.data(), entry, told, stream));
  std::shared_ptr<OpenSequence> before;
  {
    MutexLock lock(&impl_->mutex);
    before = std::exchange(impl_->entries[entry].sequence, std::move(sequence));
    impl_->entries[entry].tag = told.tag;
  }
  if (before == nullptr) return absl::OkStatus();
  StreamMark mark;
  const absl::Status set = mark.Set(stream);
  impl_->retired.push_back({std::move(mark), std::move(before)});
  return set;
}

absl::Status ResidentBatch::ReserveToken() {
  MutexLock lock(&impl_->mutex);
  std::vector<std::string> full;
  for (uint32_t i = 0; i < impl_->model.batch; ++i) {
    OpenSequence* sequence = impl_->entries[i].sequence.get();
    if (sequence == nullptr || sequence->ledger().Room() > 0) continue;
    full.push_back(absl::StrCat(i, " (sequence ", sequence->id(), ", token ",
                                sequence->ledger().tokens(), ")"));
  }
  if (!full.empty()) {
    return absl::UnavailableError(absl::StrCat(
        "no room for another token in entry ", absl::StrJoin(full, ", "),
        ": the daemon has not taken over enough of what was appended; ask it how far it is, "
        "NoteCovered, and try again"));
  }
  for (const Impl::Entry& entry : impl_->entries) {
    if (entry.sequence != nullptr) entry.sequence->ledger().Submit();
  }
  return absl::OkStatus();
}

absl::Status ResidentBatch::BeginToken(CudaStream stream) {
  const CudaDevice::Current current(*impl_->device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  return gpu::LaunchResolve(impl_->resolve, stream);
}

absl::Status ResidentBatch::Attend(uint32_t layer, const ResidentTensors& tensors,
                                   CudaStream stream) {
  if (layer >= impl_->model.layer_count) {
    return absl::InvalidArgumentError(
        absl::StrCat("layer is ", layer, "; allowed: below ", impl_->model.layer_count));
  }
  WAVEKV_RETURN_IF_ERROR(CheckTensors(tensors));
  const CudaDevice::Current current(*impl_->device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  gpu::Step step = impl_->step;
  step.inputs = {.live = impl_->live.data() + size_t{layer} * impl_->model.batch,
                 .queries = tensors.queries,
                 .new_keys = tensors.new_keys,
                 .new_values = tensors.new_values,
                 .out = tensors.out,
                 .lse = tensors.lse};
  return gpu::LaunchStep(step, stream);
}

void ResidentBatch::NoteCovered(uint32_t entry, uint64_t steady_first) {
  MutexLock lock(&impl_->mutex);
  if (entry >= impl_->model.batch || impl_->entries[entry].sequence == nullptr) return;
  impl_->entries[entry].sequence->ledger().NoteCovered(steady_first);
}

void ResidentBatch::NoteStored(uint32_t entry, uint64_t token_count, uint64_t steady_first) {
  MutexLock lock(&impl_->mutex);
  if (entry >= impl_->model.batch || impl_->entries[entry].sequence == nullptr) return;
  impl_->entries[entry].sequence->ledger().Reset(token_count, steady_first);
}

uint64_t ResidentBatch::RoomFor(uint32_t entry) const {
  MutexLock lock(&impl_->mutex);
  if (entry >= impl_->model.batch || impl_->entries[entry].sequence == nullptr) {
    return std::numeric_limits<uint64_t>::max();
  }
  return impl_->entries[entry].sequence->ledger().Room();
}

uint64_t ResidentBatch::TokensOf(uint32_t entry) const {
  MutexLock lock(&impl_->mutex);
  if (entry >= impl_->model.batch || impl_->entries[entry].sequence == nullptr) return 0;
  return impl_->entries[entry].sequence->ledger().tokens();
}

ResidentOutcome ResidentBatch::OutcomeOf(uint32_t entry) const {
  if (entry >= impl_->model.batch) return ResidentOutcome::kEmpty;
  uint32_t tag;
  {
    MutexLock lock(&impl_->mutex);
    tag = impl_->entries[entry].tag;
  }
  uint32_t worst = 0;
  for (uint32_t layer = 0; layer < impl_->model.layer_count; ++layer) {
    const size_t first = (size_t{layer} * impl_->model.batch + entry) * impl_->model.kv_head_count;
    for (uint32_t head = 0; head < impl_->model.kv_head_count; ++head) {
      const uint32_t word =
          __atomic_load_n(impl_->outcomes.data() + first + head, __ATOMIC_RELAXED);
      if (word >> 8 != tag) return ResidentOutcome::kPending;
      worst = std::max(worst, word & 0xff);
    }
  }
  return OutcomeOfCode(worst);
}

}  // namespace wavekv::client
