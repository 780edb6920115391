#include "gpu/cuda_memory.h"

#include <atomic>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/driver/device.h"
#include "gpu/driver/device_usage.h"
#include "storage/base/bytes_text.h"
#include "storage/base/log.h"
#include "storage/base/mutex.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// What a context takes on an H200, rounded up; for where it cannot be measured.
constexpr uint64_t kContextBytesAssumed = uint64_t{768} << 20;
// Each keeps a connection open: a client that fetches without end must not take all descriptors.
constexpr uint32_t kHoldersMax = 64;

// Readers that may have an allocation mapped; outlives the allocation.
struct HolderCount {
  std::atomic<uint32_t> value{0};
};

class Holder : public KeptPeer {
 public:
  explicit Holder(std::shared_ptr<HolderCount> count) : count_(std::move(count)) {
    ++count_->value;
  }
  ~Holder() override {
    if (!gone_) --count_->value;
  }
  bool OnKept(int /*socket_fd*/) override { return true; }
  void OnGone() override {
    if (!std::exchange(gone_, true)) --count_->value;
  }

 private:
  const std::shared_ptr<HolderCount> count_;
  bool gone_ = false;
};

class CudaAllocation : public DeviceAllocation {
 public:
  explicit CudaAllocation(std::shared_ptr<SharedAllocation> memory)
      : bytes_(memory->bytes()), memory_(std::move(memory)) {}

  uint64_t bytes() const override { return bytes_; }
  absl::StatusOr<UniqueFd> WritableDescriptor() override { return Export(); }
  // The importer chooses how it maps: this keeps mistakes out, not malice. docs/decisions/014.
  absl::StatusOr<UniqueFd> ReadOnlyDescriptor() override { return Export(); }
  absl::Status Seal() override { return absl::OkStatus(); }

  absl::StatusOr<std::shared_ptr<KeptPeer>> NewHolder() override {
    if (holders_->value.load() >= kHoldersMax) {
      return absl::ResourceExhaustedError(absl::StrCat(
          kHoldersMax, " readers hold this wave buffer, which is the most; end one of them"));
    }
    return std::make_shared<Holder>(holders_);
  }

  void Drop() override {
    MutexLock lock(&mutex_);
    memory_.reset();
  }

  bool HeldByReaders() const override { return holders_->value.load() > 0; }

 private:
  absl::StatusOr<UniqueFd> Export() {
    MutexLock lock(&mutex_);
    if (memory_ == nullptr) return absl::NotFoundError("the allocation was released");
    return memory_->Export();
  }

  const uint64_t bytes_;
  const std::shared_ptr<HolderCount> holders_ = std::make_shared<HolderCount>();
  Mutex mutex_;
  std::shared_ptr<SharedAllocation> memory_ ABSL_GUARDED_BY(mutex_);
};

class CudaMemory : public DeviceMemory {
 public:
  CudaMemory(std::shared_ptr<const CudaDevice> device, std::unique_ptr<DeviceStream> wiper,
             uint64_t overhead_bytes)
      : device_(std::move(device)), overhead_bytes_(overhead_bytes), wiper_(std::move(wiper)) {}

  std::string backend() const override { return "cuda"; }
  std::string device_uuid() const override { return device_->identity().uuid; }
  bool pinned() const override { return true; }
  uint64_t allocation_unit_bytes() const override { return device_->allocation_unit_bytes(); }
  uint64_t overhead_bytes() const override { return overhead_bytes_; }

  absl::StatusOr<std::unique_ptr<DeviceAllocation>> Allocate(const std::string& /*name*/,
                                                             uint64_t bytes) override {
    absl::StatusOr<std::unique_ptr<SharedAllocation>> made =
        SharedAllocation::Create(device_, bytes);
    if (absl::IsResourceExhausted(made.status())) {
      return absl::ResourceExhaustedError(
          absl::StrCat(made.status().message(),
                       "; other processes have taken the GPU's memory: free some, or lower "
                       "wavebufferd's --bytes_max"));
    }
    WAVEKV_RETURN_IF_ERROR(made.status());
    std::shared_ptr<SharedAllocation> memory = *std::move(made);
    WAVEKV_RETURN_IF_ERROR(Wipe(memory));
    return std::make_unique<CudaAllocation>(std::move(memory));
  }

 private:
  absl::Status Wipe(const std::shared_ptr<SharedAllocation>& memory) {
    WAVEKV_ASSIGN_OR_RETURN(const auto mapping,
                            DeviceMapping::Map(memory, DeviceMapping::kReadWrite));
    MutexLock lock(&mutex_);
    WAVEKV_RETURN_IF_ERROR(wiper_->Zero(mapping->address(), mapping->bytes()));
    return wiper_->Synchronise();
  }

  const std::shared_ptr<const CudaDevice> device_;
  const uint64_t overhead_bytes_;
  Mutex mutex_;
  const std::unique_ptr<DeviceStream> wiper_ ABSL_PT_GUARDED_BY(mutex_);
};

// What the context of `device` took: what is in use now, less what was before it was made.
uint64_t ContextBytes(const CudaDevice& device, const absl::StatusOr<uint64_t>& used_before) {
  const absl::StatusOr<uint64_t> used_after = ReadDeviceBytesUsed(device.identity().uuid);
  const absl::Status& status = used_before.ok() ? used_after.status() : used_before.status();
  if (status.ok() && *used_after > *used_before) return *used_after - *used_before;
  Log(LogLevel::kWarning, "context_not_measured",
      {{"assumed_bytes", kContextBytesAssumed}, {"error", status}});
  return kContextBytesAssumed;
}

absl::Status CheckLimit(const CudaDevice& device, uint64_t overhead_bytes, uint64_t bytes_max) {
  const std::string& name = device.identity().name;
  if (bytes_max < overhead_bytes + device.allocation_unit_bytes()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("--bytes_max is ", BytesText(bytes_max), ", but the context on ", name,
                     " alone takes ", BytesText(overhead_bytes), ", which counts; raise it to ",
                     BytesText(overhead_bytes), " plus --wave_buffer_bytes for each tenant"));
  }
  WAVEKV_ASSIGN_OR_RETURN(const CudaDevice::Memory memory, device.ReadMemory());
  const uint64_t largest = memory.free_bytes + overhead_bytes;
  if (bytes_max <= largest) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "--bytes_max is ", BytesText(bytes_max), ", but only ", BytesText(largest), " of the ",
      BytesText(memory.total_bytes), " of ", name, " (", device.identity().uuid,
      ") are free; lower --bytes_max, or end what else runs on that GPU"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMemory>> CreateCudaMemory(
    std::shared_ptr<const CudaDriver> driver, int device_ordinal, uint64_t bytes_max) {
  WAVEKV_ASSIGN_OR_RETURN(const CudaDevice::Identity identity,
                          CudaDevice::Identify(*driver, device_ordinal));
  const absl::StatusOr<uint64_t> used_before = ReadDeviceBytesUsed(identity.uuid);
  WAVEKV_ASSIGN_OR_RETURN(auto device, CudaDevice::Open(std::move(driver), identity));
  WAVEKV_ASSIGN_OR_RETURN(auto wiper, DeviceStream::Create(device));
  const uint64_t overhead_bytes = ContextBytes(*device, used_before);
  WAVEKV_RETURN_IF_ERROR(CheckLimit(*device, overhead_bytes, bytes_max));
  return std::make_unique<CudaMemory>(std::move(device), std::move(wiper), overhead_bytes);
}

}  // namespace wavekv
