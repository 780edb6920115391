#include "gpu/buffer_stager.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "gpu/buffer_client.h"
#include "gpu/buffer_link.h"
#include "gpu/buffer_memory.h"
#include "gpu/device_buffer.h"
#include "gpu/held_resident.h"
#include "gpu/region_layout.h"
#include "gpu/resident/resident_region.h"
#include "gpu/sequence_region.h"
#include "gpu/tenant_buffer.h"
#include "storage/base/cpuset.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/log.h"
#include "storage/base/shared_memory.h"
#include "storage/base/status_macros.h"
#include "storage/base/thread_pool.h"

namespace wavekv {
namespace {

constexpr auto kFetchTimeout = std::chrono::seconds(3);
// Steps whose misses wait to be admitted; those of further steps are forgotten, and miss again.
constexpr size_t kAdmitQueueMax = 256;
// Threads that keep the books of resident regions. More would wait for the device's transfers.
constexpr int kBookkeepersMax = 4;
constexpr char kHostBackend[] = "host";
constexpr char kCudaBackend[] = "cuda";
constexpr uint32_t kStagingTokensMax = 1u << 24;
constexpr uint32_t kRegionsMax = 1u << 16;
constexpr uint64_t kCacheBytesMax = uint64_t{1} << 40;

absl::Status NotAttached(SequenceId sequence) {
  return absl::FailedPreconditionError(
      absl::StrCat("sequence ", sequence.value(), " is not attached to a wave buffer"));
}

// A tenant's buffer in one life of the lease.
struct HeldBuffer {
  uint64_t generation = 0;
  uint64_t allocation_id = 0;
  BufferLease lease;
  std::shared_ptr<TenantBuffer> buffer;
};

struct Tenant {
  std::shared_ptr<const HeldBuffer> held;
  bool allocating = false;  // By one thread, outside the lock; others wait.
};

struct Attached {
  TenantId tenant;
  uint32_t kv_head_count = 0;
  RegionLayout layout;
  std::shared_ptr<std::atomic<uint64_t>> last_step;
  uint64_t generation = 0;  // Of the buffer that `region` lies in.
  std::shared_ptr<SequenceRegion> region;
};

// Tells its readers; a device that fails has none that could go on.
void CloseBuffer(const HeldBuffer& held) {
  const absl::Status status = held.buffer->Close();
  if (!status.ok()) Log(LogLevel::kWarning, "wave_buffer_not_closed", {{"error", status}});
}

class BufferStager : public Stager {
 public:
  BufferStager(std::unique_ptr<BufferLink> link, const BufferStagerOptions& options)
      : options_(options),
        link_(std::move(link)),
        admitter_(ThreadPoolOptions{
            .thread_count = 1, .name = "wave_admit", .queue_max = kAdmitQueueMax}),
        bookkeepers_(std::make_shared<ThreadPool>(ThreadPoolOptions{
            .thread_count = std::clamp(UsableCpuCount() / 2, 1, kBookkeepersMax) - 1,
            .name = "wave_books",
            .on_demand = true})) {}
  ~BufferStager() override;

  absl::StatusOr<WaveBufferAccess> Access(const TenantId& tenant, int64_t client_uid) override;
  absl::Status AttachSequence(const TenantId& tenant, SequenceId sequence, const ModelShape& shape,
                              uint64_t max_tokens) override;
  void DetachSequence(SequenceId sequence) override;
  absl::StatusOr<StagedStep> Stage(SequenceId sequence, uint32_t layer, uint64_t completed_step,
                                   std::span<const StageHead> heads) override;
  absl::StatusOr<StageCounters> Touch(SequenceId sequence, uint32_t layer,
                                      std::span<const StageHead> heads) override;
  absl::StatusOr<std::unique_ptr<ResidentSequence>> AttachResident(
      const TenantId& tenant, SequenceId sequence, const ModelShape& shape, uint64_t max_tokens,
      const ResidentOptions& options) override;
  size_t Sweep() override;
  std::vector<WaveBufferStatus> Status() const override;

 private:
  // The tenant's buffer in the present session, allocated if need be.
  absl::StatusOr<std::shared_ptr<const HeldBuffer>> EnsureBuffer(const TenantId& tenant);
  absl::StatusOr<std::shared_ptr<const HeldBuffer>> AllocateBuffer(const BufferSession& session,
                                                                   const TenantId& tenant);
  // Fetches the grant's descriptor and maps it, in host memory or on the device.
  absl::StatusOr<std::unique_ptr<BufferMemory>> MapGrant(const BufferLease& lease,
                                                         const BufferGrant& grant);
  // The sequence's region in the present session, carved again if its buffer was lost.
  absl::StatusOr<std::shared_ptr<SequenceRegion>> EnsureRegion(SequenceId sequence);
  absl::StatusOr<std::shared_ptr<SequenceRegion>> CarveRegion(
      const Attached& attached, SequenceId sequence,
      const std::shared_ptr<TenantBuffer>& buffer) const;
  void GiveBack(const HeldBuffer& held);
  // Gives back the buffers of tenants without a sequence or a resident region, whose clients will
  // ask for a new one when they need it. False: there was none.
  bool ReclaimIdleBuffers();
  // NotFound means that wavebufferd was started anew: attach again, and say that it was away.
  absl::Status NoteLost(const BufferSession& session, const absl::Status& status);
  void AdmitLater(std::shared_ptr<SequenceRegion> region, std::vector<MissedBlock> misses);

  const BufferStagerOptions options_;
  const std::unique_ptr<BufferLink> link_;
  DeviceCopierCache copiers_;
  std::atomic<uint64_t> hit_blocks_{0};
  std::atomic<uint64_t> miss_blocks_{0};
  std::atomic<uint64_t> admitted_blocks_{0};

  mutable Mutex mutex_;
  CondVar allocated_;
  std::map<TenantId, Tenant> tenants_ ABSL_GUARDED_BY(mutex_);  // Nodes stay where they are.
  absl::flat_hash_map<SequenceId, Attached> sequences_ ABSL_GUARDED_BY(mutex_);

  ThreadPool admitter_;  // After what its tasks use: it stops first.
  // Beside the thread that goes its rounds of the resident regions; from the first round on.
  const std::shared_ptr<ThreadPool> bookkeepers_;
};

BufferStager::~BufferStager() {
  std::vector<std::shared_ptr<const HeldBuffer>> held;
  {
    MutexLock lock(&mutex_);
    for (auto& [id, attached] : sequences_) attached.region.reset();
    for (auto& [name, tenant] : tenants_) {
      if (tenant.held != nullptr) held.push_back(std::move(tenant.held));
    }
  }
  for (const auto& buffer : held) GiveBack(*buffer);
}

void BufferStager::GiveBack(const HeldBuffer& held) {
  CloseBuffer(held);
  const absl::StatusOr<BufferSession> session = link_->Session();
  if (!session.ok() || session->generation != held.generation) return;  // It is gone already.
  const absl::Status status = link_->client().Release(held.lease.secret, held.allocation_id);
  // If not now, then it comes back when our process ends.
  if (!status.ok()) Log(LogLevel::kWarning, "wave_buffer_not_released", {{"error", status}});
}

bool BufferStager::ReclaimIdleBuffers() {
  std::vector<std::shared_ptr<const HeldBuffer>> idle;
  {
    MutexLock lock(&mutex_);
    absl::flat_hash_set<TenantId> busy;
    for (const auto& [id, attached] : sequences_) busy.insert(attached.tenant);
    for (auto& [name, tenant] : tenants_) {
      if (tenant.held == nullptr || tenant.allocating || busy.contains(name)) continue;
      // Resident regions hold it, and calls that have just got it: others come to it by us alone.
      if (tenant.held.use_count() > 1) continue;
      idle.push_back(std::move(tenant.held));
    }
  }
  for (const auto& buffer : idle) GiveBack(*buffer);
  return !idle.empty();
}

absl::Status BufferStager::NoteLost(const BufferSession& session, const absl::Status& status) {
  if (!absl::IsNotFound(status)) return status;
  link_->Expire(session.generation);
  return absl::UnavailableError(
      absl::StrCat("the wave buffer was restarted; try again: ", status.message()));
}

absl::StatusOr<std::unique_ptr<BufferMemory>> BufferStager::MapGrant(const BufferLease& lease,
                                                                     const BufferGrant& grant) {
  std::shared_ptr<DeviceCopier> copier;
  if (lease.backend == kCudaBackend) {
    // Before the ticket is used: that is good once.
    WAVEKV_ASSIGN_OR_RETURN(copier, copiers_.Get(lease.device_uuid));
  } else if (lease.backend != kHostBackend) {
    return absl::FailedPreconditionError(absl::StrCat(
        "wavebufferd at ", link_->client().address(), " has the backend '", lease.backend,
        "', expected host or cuda; run wavekvd and wavebufferd of one version"));
  }
  WAVEKV_ASSIGN_OR_RETURN(const UniqueFd fd, FetchDescriptor(lease.descriptor_socket,
                                                             grant.manager_ticket, kFetchTimeout));
  if (copier != nullptr) return MapDeviceBuffer(std::move(copier), fd.get(), grant.bytes);
  WAVEKV_RETURN_IF_ERROR(CheckSizeSealed(fd.get()));
  WAVEKV_ASSIGN_OR_RETURN(Mapping mapping,
                          Mapping::Map(fd.get(), grant.bytes, Mapping::kReadWrite));
  return MapHostBuffer(std::move(mapping));
}

absl::StatusOr<std::shared_ptr<const HeldBuffer>> BufferStager::AllocateBuffer(
    const BufferSession& session, const TenantId& tenant) {
  BufferClient& client = link_->client();
  const std::string& secret = session.lease.secret;
  const absl::StatusOr<BufferGrant> grant =
      client.Allocate(secret, tenant, options_.tenant_buffer_bytes);
  if (!grant.ok()) return NoteLost(session, grant.status());
  const auto create = [&]() -> absl::StatusOr<std::shared_ptr<TenantBuffer>> {
    WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<BufferMemory> memory, MapGrant(session.lease, *grant));
    // The header is complete before the first client can map it, which is after the seal.
    WAVEKV_ASSIGN_OR_RETURN(auto buffer,
                            TenantBuffer::Create(std::move(memory), options_.regions_max));
    WAVEKV_RETURN_IF_ERROR(client.Seal(secret, grant->allocation_id));
    return buffer;
  };
  absl::StatusOr<std::shared_ptr<TenantBuffer>> buffer = create();
  if (!buffer.ok()) {
    (void)client.Release(secret, grant->allocation_id);  // Or it goes with the lease.
    return NoteLost(session, buffer.status());
  }
  auto held = std::make_shared<HeldBuffer>();
  *held = {session.generation, grant->allocation_id, session.lease, *std::move(buffer)};
  return held;
}

absl::StatusOr<std::shared_ptr<const HeldBuffer>> BufferStager::EnsureBuffer(
    const TenantId& tenant) {
  WAVEKV_ASSIGN_OR_RETURN(const BufferSession session, link_->Session());
  std::shared_ptr<const HeldBuffer> lost;
  {
    MutexLock lock(&mutex_);
    Tenant& entry = tenants_[tenant];
    while (entry.allocating) allocated_.Wait(&mutex_);
    if (entry.held != nullptr && entry.held->generation >= session.generation) return entry.held;
    lost = std::move(entry.held);
    entry.allocating = true;
  }
  if (lost != nullptr) CloseBuffer(*lost);
  absl::StatusOr<std::shared_ptr<const HeldBuffer>> held = AllocateBuffer(session, tenant);
  if (absl::IsResourceExhausted(held.status()) && ReclaimIdleBuffers()) {
    held = AllocateBuffer(session, tenant);
  }
  MutexLock lock(&mutex_);
  Tenant& entry = tenants_[tenant];
  entry.allocating = false;
  if (held.ok()) entry.held = *held;
  allocated_.NotifyAll();
  return held;
}

absl::StatusOr<std::shared_ptr<SequenceRegion>> BufferStager::CarveRegion(
    const Attached& attached, SequenceId sequence,
    const std::shared_ptr<TenantBuffer>& buffer) const {
  auto region = SequenceRegion::Create(buffer, sequence, attached.kv_head_count, attached.layout,
                                       attached.last_step);
  if (region.ok()) return region;
  return absl::Status(
      region.status().code(),
      absl::StrCat("sequence ", sequence.value(), ": ", region.status().message(),
                   "; raise --wave_buffer_bytes, or lower --wave_buffer_cache_ratio or "
                   "--wave_buffer_staging_tokens"));
}

absl::StatusOr<std::shared_ptr<SequenceRegion>> BufferStager::EnsureRegion(SequenceId sequence) {
  WAVEKV_ASSIGN_OR_RETURN(const BufferSession session, link_->Session());
  TenantId tenant;
  {
    MutexLock lock(&mutex_);
    const auto it = sequences_.find(sequence);
    if (it == sequences_.end()) return NotAttached(sequence);
    if (it->second.generation >= session.generation) return it->second.region;
    tenant = it->second.tenant;
  }
  WAVEKV_ASSIGN_OR_RETURN(const auto held, EnsureBuffer(tenant));
  std::shared_ptr<SequenceRegion> lost;  // Closed without the lock.
  MutexLock lock(&mutex_);
  const auto it = sequences_.find(sequence);  // It may have been detached meanwhile.
  if (it == sequences_.end()) return NotAttached(sequence);
  Attached& attached = it->second;
  if (attached.generation >= held->generation) return attached.region;
  WAVEKV_ASSIGN_OR_RETURN(auto region, CarveRegion(attached, sequence, held->buffer));
  lost = std::exchange(attached.region, std::move(region));
  attached.generation = held->generation;
  return attached.region;
}

absl::StatusOr<WaveBufferAccess> BufferStager::Access(const TenantId& tenant, int64_t client_uid) {
  WAVEKV_ASSIGN_OR_RETURN(const auto held, EnsureBuffer(tenant));
  absl::StatusOr<std::string> ticket =
      link_->client().IssueTicket(held->lease.secret, held->allocation_id, client_uid);
  if (!ticket.ok()) return NoteLost({held->generation, held->lease}, ticket.status());
  return WaveBufferAccess{held->lease.device_uuid, held->lease.backend,
                          held->lease.descriptor_socket, *std::move(ticket), held->buffer->bytes()};
}

absl::Status BufferStager::AttachSequence(const TenantId& tenant, SequenceId sequence,
                                          const ModelShape& shape, uint64_t max_tokens) {
  Attached attached;
  attached.tenant = tenant;
  attached.kv_head_count = shape.kv_head_count;
  attached.layout = PlanRegion(shape, max_tokens, options_);
  attached.last_step = std::make_shared<std::atomic<uint64_t>>(0);
  {
    MutexLock lock(&mutex_);
    if (!sequences_.try_emplace(sequence, std::move(attached)).second) {
      return absl::AlreadyExistsError(
          absl::StrCat("sequence ", sequence.value(), " is attached to the wave buffer"));
    }
  }
  const absl::Status status = EnsureRegion(sequence).status();
  if (!status.ok()) DetachSequence(sequence);
  return status;
}

void BufferStager::DetachSequence(SequenceId sequence) {
  std::shared_ptr<SequenceRegion> region;
  {
    MutexLock lock(&mutex_);
    const auto it = sequences_.find(sequence);
    if (it == sequences_.end()) return;
    region = std::move(it->second.region);
    sequences_.erase(it);
  }
  if (region != nullptr) region->Close();
}

absl::StatusOr<StagedStep> BufferStager::Stage(SequenceId sequence, uint32_t layer,
                                               uint64_t completed_step,
                                               std::span<const StageHead> heads) {
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<SequenceRegion> region, EnsureRegion(sequence));
  std::vector<MissedBlock> misses;
  WAVEKV_ASSIGN_OR_RETURN(StagedStep step, region->Stage(layer, completed_step, heads, &misses));
  hit_blocks_ += step.hit_blocks;
  miss_blocks_ += step.miss_blocks;
  AdmitLater(std::move(region), std::move(misses));
  return step;
}

absl::StatusOr<StageCounters> BufferStager::Touch(SequenceId sequence, uint32_t /*layer*/,
                                                  std::span<const StageHead> heads) {
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<SequenceRegion> region, EnsureRegion(sequence));
  std::vector<MissedBlock> misses;
  const StageCounters counters = region->Touch(heads, &misses);
  hit_blocks_ += counters.hit_blocks;
  miss_blocks_ += counters.miss_blocks;
  AdmitLater(std::move(region), std::move(misses));
  return counters;
}

absl::StatusOr<std::unique_ptr<ResidentSequence>> BufferStager::AttachResident(
    const TenantId& tenant, SequenceId sequence, const ModelShape& shape, uint64_t max_tokens,
    const ResidentOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(const BufferSession session, link_->Session());
  if (session.lease.backend != kCudaBackend) {
    return absl::FailedPreconditionError(
        absl::StrCat("the wave buffer at ", link_->client().address(), " has the backend '",
                     session.lease.backend,
                     "', whose memory only wavekvd writes; use Attend, or start "
                     "wavebufferd with --backend=cuda"));
  }
  WAVEKV_ASSIGN_OR_RETURN(const auto held, EnsureBuffer(tenant));
  auto region = resident::CreateResidentRegion(held->buffer, sequence, shape, max_tokens, options,
                                               bookkeepers_);
  if (absl::IsResourceExhausted(region.status())) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "sequence ", sequence.value(), ": ", region.status().message(),
        "; raise --wave_buffer_bytes, detach others, or ask for a smaller cache_ratio"));
  }
  WAVEKV_RETURN_IF_ERROR(region.status());
  const auto check_buffer = [this, generation = held->generation]() -> absl::Status {
    WAVEKV_ASSIGN_OR_RETURN(const BufferSession now, link_->Session());
    if (now.generation == generation) return absl::OkStatus();
    return absl::UnavailableError("wavebufferd was restarted and its memory lost; attach again");
  };
  return HoldResident(*std::move(region), held, check_buffer);
}

void BufferStager::AdmitLater(std::shared_ptr<SequenceRegion> region,
                              std::vector<MissedBlock> misses) {
  if (misses.empty()) return;
  auto task = [this, region = std::move(region), misses = std::move(misses)] {
    admitted_blocks_ += region->Admit(misses);
  };
  // A full queue costs hits of later steps, nothing else.
  (void)admitter_.TrySubmit(std::move(task));
}

size_t BufferStager::Sweep() {
  std::vector<std::shared_ptr<const HeldBuffer>> buffers;
  {
    MutexLock lock(&mutex_);
    for (const auto& [name, tenant] : tenants_) {
      if (tenant.held != nullptr) buffers.push_back(tenant.held);
    }
  }
  size_t waiting = 0;
  for (const auto& held : buffers) waiting += held->buffer->Sweep();
  return waiting;
}

std::vector<WaveBufferStatus> BufferStager::Status() const {
  const BufferLease lease = link_->last_lease();
  const BufferStats stats = link_->stats();
  WaveBufferStatus status;
  status.device_uuid = lease.device_uuid;
  status.backend = lease.backend;
  status.connected = link_->Session().ok();
  status.bytes_max = stats.bytes_max;
  status.bytes_used = stats.bytes_used;
  status.hit_blocks = hit_blocks_;
  status.miss_blocks = miss_blocks_;
  status.admitted_blocks = admitted_blocks_;
  status.pinned = stats.pinned;
  return {status};
}

absl::Status FieldError(absl::string_view field, absl::string_view found,
                        absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("wave buffer: ", field, " is ", found, ", expected ", expected));
}

}  // namespace

absl::Status ValidateBufferStagerOptions(const BufferStagerOptions& options) {
  if (options.regions_max == 0 || options.regions_max > kRegionsMax) {
    return FieldError("regions_max", absl::StrCat(options.regions_max),
                      absl::StrCat("1 to ", kRegionsMax));
  }
  if (!(options.cache_ratio >= 0 && options.cache_ratio <= 1)) {
    return FieldError("--wave_buffer_cache_ratio", absl::StrCat(options.cache_ratio), "0 to 1");
  }
  const bool bounded = options.cache_bytes_max != 0;
  if (options.cache_bytes_min > kCacheBytesMax || options.cache_bytes_max > kCacheBytesMax ||
      (bounded && options.cache_bytes_min > options.cache_bytes_max)) {
    return FieldError("cache_bytes_min, cache_bytes_max",
                      absl::StrCat(options.cache_bytes_min, ", ", options.cache_bytes_max),
                      absl::StrCat("ascending (or a maximum of 0), at most ", kCacheBytesMax));
  }
  if (options.staging_tokens == 0 || options.staging_tokens > kStagingTokensMax) {
    return FieldError("--wave_buffer_staging_tokens", absl::StrCat(options.staging_tokens),
                      absl::StrCat("1 to ", kStagingTokensMax));
  }
  if (options.heartbeat_ms == 0) return FieldError("heartbeat_ms", "0", "at least 1");
  const uint64_t bytes_min = TenantBuffer::BytesMin(options.regions_max);
  if (options.tenant_buffer_bytes < bytes_min) {
    return FieldError("--wave_buffer_bytes", absl::StrCat(options.tenant_buffer_bytes),
                      absl::StrCat("at least ", bytes_min));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Stager>> ConnectWaveBuffer(const std::string& address,
                                                          const BufferStagerOptions& options) {
  WAVEKV_RETURN_IF_ERROR(ValidateBufferStagerOptions(options));
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<BufferClient> client, CreateBufferClient(address));
  WAVEKV_ASSIGN_OR_RETURN(
      std::unique_ptr<BufferLink> link,
      BufferLink::Connect(std::move(client), options.manager_name, options.heartbeat_ms));
  return std::make_unique<BufferStager>(std::move(link), options);
}

}  // namespace wavekv
